"""Text whose tokens are its bytes, as ByT5 reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from beamline.serving.contract.manifest import Id, Record


class ByteSpec(Record):
    """The value of "bytes" below "beamline" in a tokenizer's JSON file."""

    offset: Id  # the id of byte 0
    suffix: tuple[Id, ...] = ()  # ids that stand behind every encoded text
    added: dict[str, Id]  # read as one token wherever they stand in a text: </s>, <extra_id_0>
    hidden: tuple[Id, ...]  # leave no trace in a decoded text
    greedy: tuple[str, ...] = ()  # of the added ones: they take the spaces around them along


class ByteText:
    """Bytes that are no text are left out of what is decoded, as in the original."""

    def __init__(self, spec: ByteSpec) -> None:
        self._spec = spec
        self._names = {index: name for name, index in spec.added.items()}
        self._hidden = frozenset(spec.hidden)
        words = map(re.escape, sorted(spec.added, key=len, reverse=True))
        self._added = re.compile(f"({'|'.join(words) or '(?!)'})")
        self.vocab_size = max(spec.offset + 256, *(index + 1 for index in spec.added.values()))

    def encode(self, text: str, *, special: bool) -> list[int]:
        ids = tuple(self._ids(text))
        suffix = self._spec.suffix if special else ()
        if ids[len(ids) - len(suffix) :] == suffix:
            suffix = ()  # a text may end with its end token, and has no second one then
        return [*ids, *suffix]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text, special=True) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        found = b"".join(self._bytes(index) for index in ids if index not in self._hidden)
        return found.decode("utf-8", errors="ignore")

    def token(self, index: int) -> str:
        if index in self._names:
            return self._names[index]
        return chr(index - self._spec.offset) if self._is_byte(index) else ""

    def _ids(self, text: str) -> Iterator[int]:
        # Every second part is an added token. The spaces around greedy ones are not a part of the pattern, which would
        # look at each of many spaces again and again.
        parts = self._added.split(text)
        greedy = self._spec.greedy
        for number, part in enumerate(parts):
            if number % 2:
                yield self._spec.added[part]
                continue
            if number and parts[number - 1] in greedy:
                part = part.lstrip()
            if number + 1 < len(parts) and parts[number + 1] in greedy:
                part = part.rstrip()
            yield from (self._spec.offset + byte for byte in part.encode())

    def _bytes(self, index: int) -> bytes:
        if index in self._names:
            return self._names[index].encode()
        return bytes([index - self._spec.offset]) if self._is_byte(index) else b""

    def _is_byte(self, index: int) -> bool:
        return 0 <= index - self._spec.offset < 256
