"""Language models as Hugging Face publishes them: a directory, or a GGUF file, which transformers dequantises.

Transformers reads the checkpoint (no code in it is run) and is the original that the parity check compares with.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from beamline.converters.base import Chat, Converter, Loaded
from beamline.converters.checkpoint import read_json
from beamline.converters.conversion import TextSide
from beamline.converters.families import gpt2, llama
from beamline.converters.families.generation import language_defaults
from beamline.converters.modules.causal import CausalTransformer
from beamline.converters.modules.causal_graphs import CausalSteps
from beamline.serving.contract.manifest import Limits, Vocabulary
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint
from beamline.version import install_hint

FAMILIES: dict[str, ModuleType] = {"gpt2": gpt2, "llama": llama, "mistral": llama, "qwen2": llama}
MAX_BEAM_SIZE = 16
Read = TypeVar("Read")


class LanguageConverter(Converter):
    family = "language model"  # until its own name has been read

    def load(self) -> Loaded:
        if self.source.suffix == ".gguf":
            self._refuse(_unread(self.source))
        with _silent():
            config = self._read(AutoConfig.from_pretrained)
            self._refuse(_unsupported(config))
            original, found = self._read(
                AutoModelForCausalLM.from_pretrained,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # said in our words, with all the others
            )
            self._refuse(_misfits(found))
            tokenizer = self._read(AutoTokenizer.from_pretrained)
        self.family = config.model_type
        original.eval()
        model = build(original)
        generation = self._generation(config)
        vocabulary = self._vocabulary(config, generation, tokenizer)
        positions = model.config.max_positions
        limits = Limits(
            max_source_length=positions - 1,
            max_target_length=positions,
            max_beam_size=min(MAX_BEAM_SIZE, model.config.vocab_size // 4),
        )
        text = FastText(tokenizer)
        return Loaded(
            model=CausalSteps(model),
            original=lambda tokens: original(input_ids=tokens, use_cache=False).logits,
            source_text=text,
            target_text=text,
            vocabulary=vocabulary,
            limits=limits,
            defaults=language_defaults(generation, limits, str(self.source)),
            description=f"Hugging Face {config.model_type} model {config.name_or_path}".strip(),
            chat=_chat(tokenizer),
        )

    def _read(self, read: Callable[..., Read], **options: Any) -> Read:
        folder = self.source
        if folder.suffix == ".gguf":
            folder, options = folder.parent, {**options, "gguf_file": folder.name}
        try:
            return read(folder, local_files_only=True, **options)
        except Exception as error:  # of any kind: the files are a user's
            raise ConversionError(f"{self.source} can't be read: {error}") from error

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise UnsupportedCheckpoint(str(self.source), reasons)

    def _generation(self, config: Any) -> dict[str, Any]:
        """What is said about decoding, and which tokens end a text."""
        file = self.source / "generation_config.json"
        ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {**ids, **(read_json(file) if file.is_file() else {})}

    def _vocabulary(self, config: Any, generation: dict[str, Any], tokenizer: Any) -> Vocabulary:
        def first(*candidates: int | None) -> int | None:
            """Some files say -1 for none, and a tokenizer may add a token that the model has never heard of."""
            return next((each for each in candidates if each is not None and 0 <= each < config.vocab_size), None)

        eos = generation["eos_token_id"]
        if not isinstance(eos, list):
            end = first(eos, tokenizer.eos_token_id)
            eos = [] if end is None else [end]
        if not eos:
            self._refuse(["nothing says which token ends a text: eos_token_id is missing"])
        return Vocabulary(
            source_size=config.vocab_size,
            target_size=config.vocab_size,
            pad_id=first(generation["pad_token_id"], tokenizer.pad_token_id) or 0,  # never seen: any word will do
            eos_ids=tuple(eos),
            decoder_start_id=first(tokenizer.bos_token_id, generation["bos_token_id"]),
        )


def _unread(file: Path) -> list[str]:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        packages = " and ".join(missing)
        raise ConversionError(f"{file} is a GGUF file; to read it, install {packages}: {install_hint('gguf')}")
    from beamline.converters.families.gguf_file import unread  # only now: it may be missing

    return unread(file)


def _unsupported(config: Any) -> list[str]:
    """Every reason in the configuration."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return [f"its model_type is {config.model_type!r}; supported: {', '.join(FAMILIES)}"]
    reasons = [
        f"its architecture is {name}, which is no language model"
        for name in config.architectures or ()
        if not name.endswith(("ForCausalLM", "LMHeadModel"))
    ]
    if getattr(config, "quantization_config", None) is not None:
        reasons.append("its weights are quantised (quantization_config); bring those it was made from, or a GGUF file")
    reasons += family.unsupported(config)
    return reasons or list(family.causal_config(config).problems())


def _misfits(found: Any) -> list[str]:
    """From what transformers says about loading."""
    reasons = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    reasons += [f"{name} is not a part of this architecture" for name in sorted(found["unexpected_keys"])]
    reasons += [
        f"{name} has shape {list(theirs)}, but its configuration says {list(ours)}"
        for name, theirs, ours in sorted(found["mismatched_keys"])
    ]
    return reasons


def build(original: Any) -> CausalTransformer:
    """Our module with the weights of theirs; what need not be joined or turned is not copied."""
    family = FAMILIES[original.config.model_type]
    config = family.causal_config(original.config)
    with torch.device("meta"):
        model = CausalTransformer(config)
    weights = {name: tensor.detach() for name, tensor in original.state_dict().items()}
    model.load_state_dict(family.map_weights(weights, config.layers), assign=True)
    model.tie()
    if model.rotary is not None:
        turning = original.model.rotary_emb
        model.rotary.set_frequencies(turning.original_inv_freq, turning.attention_scaling)
    return model.eval()


def _chat(tokenizer: Any) -> Chat:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by their names
        template = template.get("default")
    return Chat(template, tokenizer.bos_token or "", tokenizer.eos_token or "")


class FastText(TextSide):
    """A tokenizer of the `tokenizers` library, which also serves it."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def save(self, path: Path) -> None:
        backend = getattr(self._original, "backend_tokenizer", None)
        if backend is None:
            kind = type(self._original).__name__
            raise UnsupportedCheckpoint(
                "the checkpoint", [f"its tokenizer ({kind}) can't be written as tokenizer.json"]
            )
        path.write_text(backend.to_str(), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        return list(self._original(text)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self._original.decode(ids, skip_special_tokens=True))


@contextmanager
def _silent() -> Iterator[None]:
    """Transformers reports on loading at length, and shows bars of its own; what matters is in the reasons."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
