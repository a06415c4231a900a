"""What a config file may say. Everything that shapes a run stands here, so that a run can be repeated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

# A translation may have so many tokens per token of the source, and so many more: an undertrained model repeats itself
# for ever.
MAX_LENGTH_FACTOR, MAX_LENGTH_EXTRA = 2.0, 10
SERVED = ("description", "source_language", "target_language", "decoding")  # in a checkpoint, beside the architecture


@dataclass(frozen=True)
class Settings:
    source: str  # the files are DATA/{train,valid}.SOURCE and .TARGET, one sentence per line
    target: str
    model: str  # a name in models.KINDS
    architecture: dict[str, Any]  # fields of that model's config, without vocabulary and ids
    vocab_size: int = 8000
    description: str = ""  # what `beamline models` shows
    decoding: dict[str, Any] = field(  # what a request to the served model gets where it says nothing
        default_factory=lambda: {"max_length_factor": MAX_LENGTH_FACTOR, "max_length_extra": MAX_LENGTH_EXTRA}
    )

    origin_weights: dict[str, float] = field(default_factory=dict)  # by the names in DATA/train.src
    join: float = 0.0  # this share of the samples is 2 to 4 lines in a row, to show the model long inputs
    batch_tokens: int = 4096  # of the target, padded; the source may not be larger

    learning_rate: float = 1e-3  # at its peak
    warmup_steps: int = 1000
    decay_after: int = 1000  # from here on the rate falls with the inverse square root of the step
    cooldown_steps: int = 0  # the last of max_steps, in which it falls to zero in a line: worth a BLEU point at the end
    label_smoothing: float = 0.1
    clip_norm: float = 1.0
    average_decay: float = 0.999  # of the exponential moving average of the weights

    max_steps: int = 20000
    log_every: int = 50
    validate_every: int = 500
    save_every_minutes: float = 10.0
    bleu_lines: int = 500  # the first of the valid lines are translated for BLEU and chrF
    also_validate: list[str] = field(default_factory=list)  # further DATA/NAME.SOURCE and .TARGET: their BLEU and chrF
    seed: int = 1

    @classmethod
    def read(cls, path: Path) -> Settings:
        given = json.loads(path.read_text(encoding="utf-8"))
        unknown = given.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"{path}: unknown setting {', '.join(sorted(unknown))}")
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def served(self) -> dict[str, Any]:
        """What a checkpoint says to its converter beside the architecture."""
        return dict(zip(SERVED, (self.description, self.source, self.target, self.decoding), strict=True))

    def rate(self, step: int) -> float:
        """The learning rate of `step`, counted from 1."""
        warm = min(1.0, step / max(1, self.warmup_steps))
        decay = (self.decay_after / max(step, self.decay_after, 1)) ** 0.5 if self.decay_after else 1.0
        cooldown = min(1.0, (self.max_steps + 1 - step) / self.cooldown_steps) if self.cooldown_steps else 1.0
        return self.learning_rate * warm * decay * max(0.0, cooldown)
