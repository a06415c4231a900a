"""Our own checkpoints: `config.json`, `model.safetensors` and a sentencepiece model, as `examples/translation` writes
them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from converters.base import Converter, Loaded
from converters.checkpoint import fill, read_json, read_weights
from converters.families.sentencepiece_text import SentencePieceText
from converters.modules.transformer import Transformer, TransformerConfig
from converters.modules.transformer_graphs import TransformerSteps
from serving.errors import UnsupportedCheckpoint
from serving.manifest import DecodingDefaults, Limits, Vocabulary

MODEL_TYPE = "beamline_transformer"
TOKENIZER_FILE = "spm.model"
_BESIDE_THE_CONFIG = {"model_type", "description", "source_language", "target_language", "decoding"}


class ReferenceConverter(Converter):
    family = "transformer"

    def load(self) -> Loaded:
        content = read_json(self.source / "config.json")
        config = _config(content, self.source)
        model = Transformer(config)
        fill(model, _with_tied(read_weights(self.source), config), str(self.source))
        model.eval()
        text = SentencePieceText(self.source / TOKENIZER_FILE, add_eos=True)
        return Loaded(
            model=TransformerSteps(model),
            original=model,
            source_text=text,
            target_text=text,
            vocabulary=vocabulary_of(config),
            limits=limits_of(config),
            defaults=DecodingDefaults(**{"max_length": config.max_positions, **content.get("decoding", {})}),
            source_languages=_languages(content, "source_language"),
            target_languages=_languages(content, "target_language"),
            description=content.get("description", ""),
        )


def _config(content: dict[str, object], folder: Path) -> TransformerConfig:
    names = TransformerConfig.field_names()
    reasons = [f"config.json: {name!r} is not known" for name in content if name not in names | _BESIDE_THE_CONFIG]
    values = {name: value for name, value in content.items() if name in names}
    try:
        config = TransformerConfig(**values)  # type: ignore[arg-type]
        reasons += [f"config.json: {problem}" for problem in config.problems()]
    except TypeError as error:
        reasons.append(f"config.json: {error}")
    if reasons:
        raise UnsupportedCheckpoint(str(folder), reasons)
    return config


def _with_tied(tensors: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """A tied tensor is stored once; the module wants it under each of its names."""
    target = "target_embedding.tokens.weight"
    aliases = ["source_embedding.tokens.weight"] * config.share_embeddings + ["output.weight"] * config.tie_output
    stored = next((tensors[name] for name in (target, *aliases) if name in tensors), None)
    if stored is not None:
        tensors = {**dict.fromkeys((target, *aliases), stored), **tensors}
    return tensors


def _languages(content: dict[str, object], key: str) -> tuple[str, ...]:
    value = content.get(key)
    return (str(value),) if value else ()


def vocabulary_of(config: TransformerConfig) -> Vocabulary:
    return Vocabulary(
        source_size=config.source_vocab_size,
        target_size=config.target_vocab_size,
        pad_id=config.pad_id,
        eos_ids=(config.eos_id,),
        decoder_start_id=config.decoder_start_id,
    )


def limits_of(config: TransformerConfig, max_beam_size: int = 16) -> Limits:
    return Limits(
        max_source_length=config.max_positions,
        max_target_length=config.max_positions,
        max_beam_size=min(max_beam_size, config.target_vocab_size // 4),
    )
