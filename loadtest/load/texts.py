"""The texts of requests: lines of a file, the sentences shipped with the tool, or synthetic ones of chosen lengths."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from beamline.loadtest.errors import LoadTestError

SENTENCES = Path(__file__).with_name("sentences.txt")
BLOCK = 4096  # requests whose choices are drawn at once
LONGEST = 4000
_CORPUS = 1 << 18  # characters that synthetic texts are cut from
_WORD = 5.5  # letters, in the mean


class Texts(Protocol):
    def text(self, number: int) -> str: ...

    def __str__(self) -> str: ...


def read_lines(path: Path) -> list[str]:
    """The lines that are not blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LoadTestError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LoadTestError(f"{path} is not UTF-8: {error}") from error
    return [line for line in text.splitlines() if line.strip()]


class FileTexts:
    """Lines in random order; no line is repeated before every other one was sent."""

    def __init__(self, lines: Sequence[str], seed: int, name: str = "texts of a file") -> None:
        if not lines:
            raise LoadTestError("there is no text to send: every line is blank")
        self._lines = list(lines)
        self._name = name
        self._seed = seed
        self._round = -1
        self._order: list[int] = []

    def text(self, number: int) -> str:
        turn, index = divmod(number, len(self._lines))
        if turn != self._round:
            self._order = np.random.default_rng([self._seed, 4, turn]).permutation(len(self._lines)).tolist()
            self._round = turn
        return self._lines[self._order[index]]

    def __str__(self) -> str:
        return f"{len(self._lines)} {self._name}"


@dataclass(frozen=True, slots=True)
class Fixed:
    length: int

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return np.full(count, self.length, np.int64)

    def __str__(self) -> str:
        return f"of {self.length} characters"


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return rng.integers(self.low, self.high, count, endpoint=True)

    def __str__(self) -> str:
        return f"of {self.low} to {self.high} characters"


@dataclass(frozen=True, slots=True)
class Lognormal:
    """What the lengths of sentences look like: most are short, a few are long."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        lengths = np.rint(self.median * np.exp(self.sigma * rng.standard_normal(count)))
        return np.clip(lengths, 1, LONGEST).astype(np.int64)

    def __str__(self) -> str:
        return f"of about {self.median:g} characters (lognormal, sigma {self.sigma:g})"


Lengths = Fixed | Uniform | Lognormal


class SyntheticTexts:
    """Random words of exactly as many characters (and bytes) as drawn. Each text begins with its number, in letters: no
    two are the same, unless only `distinct` of them are asked for or they are too short for it."""

    def __init__(self, lengths: Lengths, seed: int, distinct: int | None = None) -> None:
        self._lengths = lengths
        self._seed = seed
        self._distinct = distinct
        self._corpus = ""
        self._block = -1
        self._drawn: list[tuple[int, int]] = []  # length and place of each text of the block

    def text(self, number: int) -> str:
        # Prime to most counts, so that repeated texts do not keep step with other things that repeat.
        which = number if self._distinct is None else number * 7919 % self._distinct
        block, index = divmod(which, BLOCK)
        if block != self._block:
            self._draw(block)
        length, place = self._drawn[index]
        letters = _letters(which)
        if length < len(letters) + 2:
            return letters[-length:].rjust(length, "0")
        words = self._corpus[place : place + length - len(letters) - 1]
        # A server may strip or join spaces, and the length would be another.
        if words[0] == " " or words[-1] == " ":
            words = f"{words.strip()}{'x' * (len(words) - len(words.strip()))}"
        return f"{letters} {words}"

    def _draw(self, block: int) -> None:
        if not self._corpus:
            self._corpus = _words(np.random.default_rng([self._seed, 5]))
        rng = np.random.default_rng([self._seed, 6, block])
        lengths = self._lengths.draw(rng, BLOCK).tolist()
        places = rng.integers(0, _CORPUS - LONGEST, BLOCK).tolist()
        self._drawn = list(zip(lengths, places, strict=True))
        self._block = block

    def __str__(self) -> str:
        count = "all different" if self._distinct is None else f"{self._distinct} different"
        return f"synthetic texts {self._lengths}, {count}"


def _letters(number: int) -> str:
    """The number in base 26, last digit last."""
    letters = ""
    while True:
        number, digit = divmod(number, 26)
        letters = string.ascii_lowercase[digit] + letters
        if not number:
            return letters


def _words(rng: np.random.Generator) -> str:
    alphabet = np.frombuffer((string.ascii_lowercase + " ").encode(), np.uint8)
    chances = np.full(27, (1 - 1 / _WORD) / 26)
    chances[-1] = 1 / _WORD
    letters = rng.choice(alphabet, _CORPUS, p=chances)
    doubled = (letters == ord(" ")) & (np.roll(letters, 1) == ord(" "))
    letters[doubled] = ord("e")
    return letters.tobytes().decode("ascii")
