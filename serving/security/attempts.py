"""A limit of tries for whoever guesses tokens.

Behind a proxy many clients have one address, so the limit must not lock out those who know theirs: while an address has
had too many wrong tokens, tokens that were right before still are, and all others are refused without being looked at.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from beamline.serving.errors import Overloaded, RequestError
from beamline.serving.security.access import Client
from beamline.serving.security.tokens import WrongToken

log = logging.getLogger(__name__)

_MOST = 20  # different wrong tokens of one address
_SECONDS = 60.0  # within which they are counted, and for which others are refused
_MOST_ADDRESSES = 10_000  # the longest forgotten first: memory is bounded


@dataclass(slots=True)
class _Wrong:
    """A token that is sent again and again is a client's mistake, and no guess: each counts once."""

    since: float
    digests: set[str] = field(default_factory=set)


class TokenAttempts:
    """Not thread-safe: it belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, _Wrong] = OrderedDict()  # by address
        self._accepted: set[str] = set()  # names of tokens

    def settle(self, outcome: Client | RequestError, address: str) -> Client:
        """What becomes of a call, by what its token said. Raises the error, or `Overloaded`."""
        if not isinstance(outcome, Client | WrongToken):
            raise outcome
        if not (isinstance(outcome, Client) and (outcome.name is None or outcome.name in self._accepted)):
            self._check(address)
        if isinstance(outcome, WrongToken):
            log.warning("a wrong token came from %s", address)
            self._note(address, outcome.digest)
            raise outcome
        if outcome.name is not None:
            self._accepted.add(outcome.name)
        return outcome

    def _check(self, address: str) -> None:
        wrong = self._wrong.get(address)
        if wrong is None:
            return
        remaining = wrong.since + _SECONDS - self._clock()
        if remaining <= 0:
            del self._wrong[address]
        elif len(wrong.digests) >= _MOST:
            raise Overloaded("too many wrong tokens have come from your address: try again later", max(1.0, remaining))

    def _note(self, address: str, digest: str) -> None:
        wrong = self._wrong.setdefault(address, _Wrong(self._clock()))
        wrong.digests.add(digest)
        self._wrong.move_to_end(address)
        if len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)
