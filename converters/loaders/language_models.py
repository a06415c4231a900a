"""Language models as Hugging Face publishes them: a directory, or a GGUF file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from beamline.converters.checkpoints.files import read_json
from beamline.converters.checkpoints.generation_config import language_defaults
from beamline.converters.checkpoints.gguf import unread
from beamline.converters.checkpoints.tokenizers import FastTokenizer
from beamline.converters.loaders.hugging_face import MAX_BEAM_SIZE, Checkpoint, wrong_kind
from beamline.converters.modules.transformer.config import DecoderOnlyConfig
from beamline.converters.modules.transformer.decoder_only import DecoderOnlyTransformer
from beamline.converters.modules.transformer.embedding import Rotary
from beamline.converters.modules.transformer.steps import DecoderOnlySteps
from beamline.converters.tasks.generation import Chat, GenerationConverter, LoadedModel
from beamline.serving.contract.manifest import Limits, Vocabulary


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
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors by the names of a `DecoderOnlyTransformer`."""

    @classmethod
    def frequencies(cls, original: Any) -> list[tuple[Tensor, float]]:
        """Of rotary positions, and what their result is multiplied by; for each table of angles."""
        rotary = original.base_model.rotary_emb
        return [(rotary.original_inv_freq, rotary.attention_scaling)]

    def load(self) -> LoadedModel:
        from transformers import AutoModelForCausalLM

        checkpoint = Checkpoint(self.source)
        if self.source.suffix == ".gguf":
            checkpoint.refuse(unread(self.source))
        config = checkpoint.config()
        checkpoint.refuse(self._unsupported(config))
        original, tokenizer = checkpoint.model(AutoModelForCausalLM), checkpoint.tokenizer()
        self.family = config.model_type
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
            renormalise=bool(generation.get("renormalize_logits", False)),
            description=f"Hugging Face {config.model_type} model {config.name_or_path}".strip(),
            chat=_chat(tokenizer),
        )

    @classmethod
    def build(cls, original: Any) -> DecoderOnlyTransformer:
        """Our module with the weights of theirs; what need not be joined or put into another order is not copied."""
        config = cls.architecture(original.config)
        with torch.device("meta"):
            model = DecoderOnlyTransformer(config)
        weights = {name: tensor.detach() for name, tensor in original.state_dict().items()}
        model.load_state_dict(cls.map_weights(original.config, weights), assign=True)
        model.tie()
        if tables := model.embedding.rotary:
            for table, (frequencies, scaling) in zip(tables, cls.frequencies(original), strict=False):
                cast(Rotary, table).set_frequencies(frequencies, scaling)
        return model.eval()

    def _unsupported(self, config: Any) -> list[str]:
        """Every reason in the configuration."""
        reasons = wrong_kind(config, self.model_types, ("ForCausalLM", "LMHeadModel"), "language model")
        if config.model_type not in self.model_types:
            return reasons
        reasons += self.unsupported(config)
        return reasons or self.architecture(config).problems()

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
            Checkpoint(self.source).refuse(["nothing says which token ends a text: eos_token_id is missing"])
        return Vocabulary(
            source_size=config.vocab_size,
            target_size=config.vocab_size,
            pad_id=first(generation["pad_token_id"], tokenizer.pad_token_id) or 0,  # never seen: any word will do
            eos_ids=tuple(eos),
            decoder_start_id=first(tokenizer.bos_token_id, generation["bos_token_id"]),
        )


def parts_of_heads(joined: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in which each head has its query, key and value next to each other -> all queries, keys, values."""
    rows = joined.unflatten(0, (heads, 3, -1))  # type: ignore[no-untyped-call]
    query, key, value = (rows[:, part].flatten(0, 1) for part in range(3))
    return query, key, value


def _chat(tokenizer: Any) -> Chat:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by their names
        template = template.get("default")
    if template is None:
        return Chat(None, tokenizer.bos_token or "", tokenizer.eos_token or "")
    others = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if name not in ("bos_token", "eos_token") and isinstance(token, str)
    }
    return Chat(template, tokenizer.bos_token or "", tokenizer.eos_token or "", others)
