"""Language models as Hugging Face publishes them: a directory, or a GGUF file, which transformers dequantises.

Transformers reads the checkpoint (no code in it is run) and is the original that the parity check compares with. It
takes seconds to import, so it is imported only where a checkpoint is read.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any, TypeVar

import torch
from torch import Tensor

from beamline.converters.checkpoints.files import read_json
from beamline.converters.checkpoints.generation_config import language_defaults
from beamline.converters.checkpoints.gguf import unread
from beamline.converters.checkpoints.tokenizers import FastTokenizer
from beamline.converters.modules.transformer.config import DecoderOnlyConfig
from beamline.converters.modules.transformer.decoder_only import DecoderOnlyTransformer
from beamline.converters.modules.transformer.steps import DecoderOnlySteps
from beamline.converters.tasks.generation import Chat, GenerationConverter, LoadedModel
from beamline.serving.contract.manifest import Limits, Vocabulary
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint

# What Hugging Face calls them -> what we call them.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
MAX_BEAM_SIZE = 16
Read = TypeVar("Read")


class LanguageModelConverter(GenerationConverter):
    """A family says what it can't take, and maps configuration and weights."""

    @classmethod
    @abstractmethod
    def unsupported(cls, config: Any) -> list[str]:
        """Every reason against a configuration of transformers."""

    @classmethod
    @abstractmethod
    def architecture(cls, config: Any) -> DecoderOnlyConfig: ...

    @classmethod
    @abstractmethod
    def map_weights(cls, tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
        """Their tensors by the names of a `DecoderOnlyTransformer`."""

    def load(self) -> LoadedModel:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        if self.source.suffix == ".gguf":
            self._refuse(unread(self.source))
        with _silent():
            config = self._read(AutoConfig.from_pretrained)
            self._refuse(self._unsupported(config))
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
        model = self.build(original)
        generation = self._generation(config)
        vocabulary = self._vocabulary(config, generation, tokenizer)
        positions = model.architecture.decoder.max_positions
        limits = Limits(
            max_source_length=positions - 1,
            max_target_length=positions,
            max_beam_size=min(MAX_BEAM_SIZE, config.vocab_size // 4),
        )
        text = FastTokenizer(tokenizer)
        return LoadedModel(
            model=DecoderOnlySteps(model),
            original=lambda tokens: original(input_ids=tokens, use_cache=False).logits,
            source_tokenizer=text,
            target_tokenizer=text,
            vocabulary=vocabulary,
            limits=limits,
            defaults=language_defaults(generation, limits, str(self.source)),
            description=f"Hugging Face {config.model_type} model {config.name_or_path}".strip(),
            chat=_chat(tokenizer),
        )

    @classmethod
    def build(cls, original: Any) -> DecoderOnlyTransformer:
        """Our module with the weights of theirs; what need not be joined or turned is not copied."""
        config = cls.architecture(original.config)
        with torch.device("meta"):
            model = DecoderOnlyTransformer(config)
        weights = {name: tensor.detach() for name, tensor in original.state_dict().items()}
        model.load_state_dict(cls.map_weights(weights, config.decoder.layers), assign=True)
        model.tie()
        if model.embedding.rotary is not None:
            turning = original.model.rotary_emb
            model.embedding.rotary.set_frequencies(turning.original_inv_freq, turning.attention_scaling)
        return model.eval()

    def _unsupported(self, config: Any) -> list[str]:
        """Every reason in the configuration."""
        if config.model_type not in self.model_types:
            return [f"its model_type is {config.model_type!r}; supported: {', '.join(self.model_types)}"]
        reasons = [
            f"its architecture is {name}, which is no language model"
            for name in config.architectures or ()
            if not name.endswith(("ForCausalLM", "LMHeadModel"))
        ]
        if getattr(config, "quantization_config", None) is not None:
            reasons.append(
                "its weights are quantised (quantization_config); bring those it was made from, or a GGUF file"
            )
        reasons += self.unsupported(config)
        return reasons or self.architecture(config).problems()

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


def _misfits(found: Any) -> list[str]:
    """From what transformers says about loading."""
    reasons = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    reasons += [f"{name} is not a part of this architecture" for name in sorted(found["unexpected_keys"])]
    reasons += [
        f"{name} has shape {list(theirs)}, but its configuration says {list(ours)}"
        for name, theirs, ours in sorted(found["mismatched_keys"])
    ]
    return reasons


def _chat(tokenizer: Any) -> Chat:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by their names
        template = template.get("default")
    return Chat(template, tokenizer.bos_token or "", tokenizer.eos_token or "")


@contextmanager
def _silent() -> Iterator[None]:
    """Transformers reports on loading at length, and shows bars of its own; what matters is in the reasons."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
