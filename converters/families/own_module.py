"""One's own nn.Module that follows `converters/own/protocol.py`: `beamline convert file.py:build --weights W ...`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from torch import Tensor, nn

from beamline.converters.checkpoints.files import fill, read_weights
from beamline.converters.checkpoints.generation_config import stated_defaults
from beamline.converters.checkpoints.source import Source
from beamline.converters.checkpoints.tokenizers import read_tokenizer
from beamline.converters.own.check import Checker
from beamline.converters.own.load import Origin, build
from beamline.converters.own.protocol import Settings
from beamline.converters.own.steps import OwnSteps
from beamline.converters.own.trace import check_traceable
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel, search_constants
from beamline.serving.contract.manifest import Limits, Vocabulary
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint


class OwnModuleConverter(GenerationConverter):
    family = "own"
    description = "one's own nn.Module, `file.py:build`: see docs/own-model.md"

    def __init__(self, origin: Origin, weights: Path, tokenizer: Path, target_tokenizer: Path | None = None) -> None:
        super().__init__(origin.file)
        self.origin, self.weights = origin, weights
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer

    @classmethod
    def recognises(cls, source: Source) -> bool:
        return Origin.parse(str(source.path)) is not None

    @classmethod
    def from_source(cls, source: Source) -> Self:
        origin, own = Origin.parse(str(source.path)), source.own
        assert origin is not None
        if own.weights is None or own.tokenizer is None:
            raise ConversionError("one's own module needs --weights FILE (safetensors, npz) and --tokenizer FILE")
        return cls(origin, own.weights, own.tokenizer, own.target_tokenizer)

    def load(self) -> LoadedModel:
        module = build(self.origin)
        checker = Checker(module, self.origin)
        checker.check_interface()
        settings = checker.own.settings
        tensors = read_weights(self.weights.parent, (self.weights.name,))
        names = settings.weight_names
        fill(module, {names.get(name, name): tensor for name, tensor in tensors.items()}, str(self.weights))
        module.eval().requires_grad_(False)
        checker.check_shapes()
        steps = OwnSteps(module)
        loaded = self._loaded(module, steps, settings)
        # Before it is compared alone and in a batch: an `if` on values would show there too, but without its line.
        check_traceable(steps, search_constants(loaded), self.origin)
        checker.check_independence()
        return loaded

    def _loaded(self, module: nn.Module, steps: OwnSteps, settings: Settings) -> LoadedModel:
        sizes = settings.source_vocab_size, settings.target_vocab_size
        if self.target_tokenizer is None and sizes[0] != sizes[1]:
            raise UnsupportedCheckpoint(
                str(self.source),
                [f"it reads {sizes[0]} words and writes {sizes[1]}, two vocabularies: add --target-tokenizer"],
            )
        source_tokenizer = read_tokenizer(self.tokenizer)
        candidates = max(2, 1 + len(settings.eos_ids))  # of each beam, all of them different words
        limits = Limits(
            max_source_length=settings.max_source_length,
            max_target_length=settings.max_target_length,
            max_beam_size=min(settings.max_beam_size, max(1, settings.target_vocab_size // candidates)),
        )
        return LoadedModel(
            model=steps,
            original=_original(module, steps),
            source_tokenizer=source_tokenizer,
            target_tokenizer=read_tokenizer(self.target_tokenizer) if self.target_tokenizer else source_tokenizer,
            vocabulary=Vocabulary(
                source_size=settings.source_vocab_size,
                target_size=settings.target_vocab_size,
                pad_id=settings.pad_id,
                eos_ids=settings.eos_ids,
                decoder_start_id=settings.decoder_start_id,
            ),
            limits=limits,
            defaults=stated_defaults(dict(settings.decoding), limits, str(self.source)),
            source_languages=(settings.source_language,) if settings.source_language else (),
            target_languages=(settings.target_language,) if settings.target_language else (),
            description=settings.description,
        )


def _original(module: nn.Module, steps: OwnSteps) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """As it was trained, where the module says so; else its steps, in plain PyTorch."""
    own = getattr(module, "teacher_forced", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    return lambda source, source_mask, target: steps.score(source, source_mask, target)[0]
