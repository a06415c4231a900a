"""Encoder-decoders as Hugging Face publishes them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.checkpoints.generation_config import decoding_defaults
from beamline.converters.checkpoints.tokenizers import FastTokenizer, OriginalTokenizer
from beamline.converters.loaders.hugging_face import Checkpoint, wrong_kind
from beamline.converters.loaders.reference import limits_for
from beamline.converters.modules.transformer.config import EncoderDecoderConfig
from beamline.converters.modules.transformer.encoder_decoder import EncoderDecoderTransformer
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel
from beamline.serving.contract.manifest import Languages, Vocabulary


@dataclass(frozen=True)
class Text:
    """How text becomes ids on either side, and which languages a request may name."""

    tokenizer: OriginalTokenizer
    languages: Languages | None = None
    target_tokenizer: OriginalTokenizer | None = None  # where the target has a vocabulary of its own


class Seq2SeqConverter(GenerationConverter):
    """A family says what it can't take, and maps configuration and weights."""

    endings: ClassVar[tuple[str, ...]] = ("ForConditionalGeneration", "MTModel")  # of transformers' classes

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        """Every reason against a configuration of transformers."""
        return []

    @classmethod
    @abstractmethod
    def architecture(cls, config: Any, tensors: Mapping[str, Tensor]) -> EncoderDecoderConfig: ...

    @classmethod
    @abstractmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors by the names of an `EncoderDecoderTransformer`. The output's bias is `output.bias`."""

    @classmethod
    def stored_under(cls, config: Any, name: str) -> str | None:
        """Which of the tensors that are there is also the one of this name, which is not."""
        return None

    def text(self, tokenizer: Any, config: Any, generation: Mapping[str, Any]) -> Text:
        return Text(FastTokenizer(tokenizer))

    def load(self) -> LoadedModel:
        from transformers import AutoModelForSeq2SeqLM

        checkpoint = Checkpoint(self.source)
        config = checkpoint.config()
        reasons = wrong_kind(config, self.model_types, self.endings, "encoder-decoder that writes")
        checkpoint.refuse(reasons + self.unsupported(config))
        original = checkpoint.model(AutoModelForSeq2SeqLM, self.stored_under)
        tokenizer = checkpoint.tokenizer()
        self.family = config.model_type
        # As transformers itself understands generation_config.json, or what older checkpoints say in config.json.
        generation = original.generation_config.to_diff_dict()
        vocabulary = self._vocabulary(original, generation)
        model = self.build(original)
        checkpoint.refuse(model.architecture.problems())
        text = self.text(tokenizer, config, generation)
        languages = text.languages
        limits = limits_for(model.architecture.decoder.max_positions, vocabulary.target_size)
        limits = limits.model_copy(update={"max_source_length": model.architecture.encoder.max_positions})
        return LoadedModel(
            model=EncoderDecoderSteps(model),
            original=_logits_of(original),
            source_tokenizer=text.tokenizer,
            target_tokenizer=text.target_tokenizer or text.tokenizer,
            vocabulary=vocabulary,
            limits=limits,
            defaults=decoding_defaults(generation, limits, str(self.source)),
            renormalise=bool(generation.get("renormalize_logits", False)),
            languages=languages,
            source_languages=() if languages is None else tuple(each.code for each in languages.source),
            target_languages=() if languages is None else tuple(each.code for each in languages.target),
            description=f"Hugging Face {config.model_type} model {config.name_or_path}".strip(),
        )

    @classmethod
    def build(cls, original: Any) -> EncoderDecoderTransformer:
        """Our module with the weights of theirs; what need not be joined is not copied."""
        weights = {name: tensor.detach() for name, tensor in original.state_dict().items()}
        architecture = cls.architecture(original.config, weights)
        with torch.device("meta"):
            model = EncoderDecoderTransformer(architecture)
        model.load_state_dict(cls.map_weights(original.config, weights), assign=True)
        model.tie()
        return model.eval()

    def _vocabulary(self, original: Any, generation: Mapping[str, Any]) -> Vocabulary:
        config = original.config
        source_size, size = (
            original.get_input_embeddings().num_embeddings,
            original.get_output_embeddings().out_features,
        )

        def stated(name: str) -> Any:
            return generation.get(name, getattr(config, name, None))

        pad, eos, start = (stated(name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"))
        ends = tuple(eos) if isinstance(eos, list) else (eos,)
        start = ends[0] if start is None else start  # a model whose requests name a language begins with that
        named = {"pad_token_id": (pad,), "eos_token_id": ends, "decoder_start_token_id": (start,)}
        Checkpoint(self.source).refuse(
            [
                f"{name} is {each}, outside the vocabulary of {size}"
                for name, ids in named.items()
                for each in ids
                if each is None or not 0 <= each < size
            ]
        )
        return Vocabulary(source_size=source_size, target_size=size, pad_id=pad, eos_ids=ends, decoder_start_id=start)


def output_bias(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """None where it adds nothing, as in every published model: adding that to the whole vocabulary takes time too."""
    bias = tensors.get("final_logits_bias")
    return None if bias is None or not bias.any() else bias[0]


def _logits_of(original: Any) -> Any:
    def logits(source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        found = original(input_ids=source, attention_mask=source_mask.long(), decoder_input_ids=target, use_cache=False)
        return found.logits  # type: ignore[no-any-return]

    return logits
