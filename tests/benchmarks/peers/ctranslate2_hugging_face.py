"""A Hugging Face directory -> CTranslate2's format, by CTranslate2's own converter: SOURCE TARGET.

Runs in an environment of CTranslate2, torch and transformers.
"""

from __future__ import annotations

import sys

from ctranslate2.converters import TransformersConverter


def main() -> None:
    source, target = sys.argv[1:]
    TransformersConverter(source, low_cpu_mem_usage=False).convert(target)


if __name__ == "__main__":
    main()
