"""A GGUF file in another of llama.cpp's kinds, by its own quantiser: FILE TO KIND. Runs in its own environment."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp


def main() -> None:
    file, to, kind = sys.argv[1:]
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.allow_requantize = True  # the file is quantised already; 8 bits lose nearly nothing of its 4
    if llama_cpp.llama_model_quantize(file.encode(), to.encode(), ctypes.byref(options)) != 0:
        raise SystemExit(f"llama.cpp can't bring {file} to {kind}")


if __name__ == "__main__":
    main()
