"""Which requests are sent: a mix of texts, models and options, or those of a trace. Request `n` is the same in every
run with the same seed, however many processes share the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from beamline.loadtest.load.texts import BLOCK, Texts
from beamline.loadtest.targets.target import Options, Request


class Workload(Protocol):
    """Picklable: every worker process has a copy, and takes the requests that it sends from it."""

    def request(self, number: int) -> Request: ...

    def kinds(self) -> list[Request]:
        """One request for every model and every set of options, to be tried before the run."""
        ...

    def __str__(self) -> str: ...


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mix(Generic[T]):
    """Choices with their weights."""

    choices: tuple[T, ...]
    weights: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        weights = np.asarray(self.weights)
        return rng.choice(len(self.choices), size=count, p=weights / weights.sum())


def only(choice: T) -> Mix[T]:
    return Mix((choice,), (1.0,))


class MixedWorkload:
    def __init__(self, texts: Texts, models: Mix[str], options: Mix[Options], seed: int) -> None:
        self._texts = texts
        self._models = models
        self._options = options
        self._seed = seed
        self._block = -1
        self._model_of: list[int] = []
        self._options_of: list[int] = []

    def request(self, number: int) -> Request:
        block, index = divmod(number, BLOCK)
        if block != self._block:
            rng = np.random.default_rng([self._seed, 3, block])
            self._model_of = self._models.draw(rng, BLOCK).tolist()
            self._options_of = self._options.draw(rng, BLOCK).tolist()
            self._block = block
        return Request(
            number,
            self._texts.text(number),
            self._models.choices[self._model_of[index]],
            self._options.choices[self._options_of[index]],
        )

    def kinds(self) -> list[Request]:
        text = self._texts.text(0)
        return [Request(0, text, model, options) for model in self._models.choices for options in self._options.choices]

    def __str__(self) -> str:
        return str(self._texts)


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """The requests of a trace, in its order; from the beginning again if there are not enough."""

    requests: tuple[Request, ...]

    def request(self, number: int) -> Request:
        return self.requests[number % len(self.requests)]

    def kinds(self) -> list[Request]:
        return list({(each.model, each.options): each for each in reversed(self.requests)}.values())

    def __str__(self) -> str:
        return f"{len(self.requests)} requests of a trace"
