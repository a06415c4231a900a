"""A Hugging Face directory -> CTranslate2's format, by CTranslate2's own converter: SOURCE TARGET.

Runs in an environment of CTranslate2, torch and transformers.
"""

from __future__ import annotations

import sys
from typing import Any

from ctranslate2.converters import TransformersConverter
from ctranslate2.converters import transformers as loaders


@loaders.register_loader("T5Config")
class T5Loader(loaders.T5Loader):  # type: ignore[misc]
    """The converter divides the logits by the root of the width where `tie_word_embeddings` says so; transformers 5 has
    set that for every T5, and says it by another name. Without this FLAN-T5 would be another model there."""

    def get_model_spec(self, model: Any) -> Any:
        model.config.tie_word_embeddings = model.config.scale_decoder_outputs
        return super().get_model_spec(model)


def main() -> None:
    source, target = sys.argv[1:]
    TransformersConverter(source, low_cpu_mem_usage=False).convert(target)


if __name__ == "__main__":
    main()
