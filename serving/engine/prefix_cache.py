"""The cache entries of recent prompts: one that begins as another did need not be computed from its first token.

Bounded in bytes; what was not asked for the longest goes first, sooner where the device has too little memory for what
runs. Off with a limit of 0. Each tenant finds only its own prompts: how much of a prompt was known is reported to its
sender, and would tell what others have sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamline.serving.contract.backend import Ints

WORTHWHILE = 16  # tokens; fewer are computed faster than kept


@dataclass(eq=False, slots=True)
class _Entry:
    tokens: Ints
    memory: Any  # None: it was forgotten
    size: int  # bytes
    tenant: str


@dataclass(frozen=True, slots=True)
class Known:
    """The beginning of a prompt that is known; nothing of it is, once it was forgotten. So whoever keeps this does not
    keep the memory."""

    _entry: _Entry
    _length: int

    @property
    def memory(self) -> Any:
        """The backend's; may hold more than this."""
        return self._entry.memory

    @property
    def length(self) -> int:
        return 0 if self._entry.memory is None else self._length


class PrefixCache:
    def __init__(self, limit: int, shared: bool = False) -> None:
        self.limit = limit  # bytes
        self._shared = shared  # by all tenants
        self.size = 0
        self._entries: list[_Entry] = []  # the one that was used last is last

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Sequence[int], tenant: str = "") -> Known | None:
        """The longest beginning of these that is known of this tenant's prompts."""
        if not self._entries or len(tokens) < WORTHWHILE:
            return None
        wanted = np.asarray(tokens, np.int64)
        lengths = [_common(entry.tokens, wanted) if self._visible(entry, tenant) else 0 for entry in self._entries]
        best = int(np.argmax(lengths))
        if lengths[best] < WORTHWHILE:
            return None
        entry = self._entries.pop(best)
        self._entries.append(entry)
        return Known(entry, lengths[best])

    def wants(self, tokens: Sequence[int], tenant: str = "") -> bool:
        """Whether a prompt would add anything."""
        if not self.limit or len(tokens) < WORTHWHILE:
            return False
        wanted = np.asarray(tokens, np.int64)
        return all(_common(entry.tokens, wanted) < len(wanted) for entry in self._of(tenant))

    def put(self, tokens: Sequence[int], memory: Any, size: int, tenant: str = "") -> None:
        """A prompt whose entries are all there. Those that it continues (earlier turns of a talk) make room for it."""
        if size > self.limit:
            return
        new = _Entry(np.asarray(tokens, np.int64), memory, size, tenant)
        covered = [entry for entry in self._of(tenant) if _common(entry.tokens, new.tokens) == len(entry.tokens)]
        for entry in covered:
            self._drop(entry)
        self._entries.append(new)
        self.size += size
        while self.size > self.limit:
            self._drop(self._entries[0])

    def forget_some(self) -> bool:
        """At least half of the bytes, those that were not asked for the longest; whether there were any. What a request
        still uses, on its way into a slot, was asked for last and goes last; its memory is freed when that is over."""
        if not self._entries:
            return False
        kept = self.size // 2
        self._drop(self._entries[0])
        while self.size > kept:
            self._drop(self._entries[0])
        return True

    def _of(self, tenant: str) -> list[_Entry]:
        return [entry for entry in self._entries if self._visible(entry, tenant)]

    def _visible(self, entry: _Entry, tenant: str) -> bool:
        return self._shared or entry.tenant == tenant

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self.size -= entry.size
        entry.memory = None


def _common(one: Ints, other: Ints) -> int:
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
