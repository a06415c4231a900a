"""The inputs of a call as token ids: the one place where they are read and limited, for every kind of call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.model_card import Tokenizer


@dataclass(frozen=True, slots=True)
class InputReader:
    """Pure and synchronous: it may run on any thread. `purpose` is what the model does with an input, for messages."""

    model: str
    purpose: Literal["translate", "read", "score", "continue"]
    limits: TextLimits

    def check_count(self, inputs: int) -> None:
        if not inputs:
            raise InvalidRequest(f"inputs is empty; give 1 to {self.limits.max_inputs}")
        if inputs > self.limits.max_inputs:
            raise InvalidRequest(f"the call has {inputs} inputs; at most {self.limits.max_inputs} are allowed")

    def check_size(self, where: str, text: str) -> str:
        limit = self.limits.max_text_bytes
        # A character has one to four bytes, so most texts are settled without encoding them.
        if len(text) * 4 > limit and (len(text) > limit or len(text.encode("utf-8")) > limit):
            raise InvalidRequest(
                f"{where} is longer than {limit} bytes, the most that one text may have: send it in several"
            )
        return text

    def text(self, where: str, text: str) -> str:
        self.check_size(where, text)
        if not text.strip():
            raise InvalidRequest(f"{where} is empty; there is nothing to {self.purpose}")
        return text

    def token_ids(self, where: str, ids: Sequence[int], vocabulary_size: int, vocabulary: str) -> Sequence[int]:
        if not ids:
            raise InvalidRequest(f"{where} has no ids; there is nothing to {self.purpose}")
        if max(ids) >= vocabulary_size:
            raise InvalidRequest(
                f"{where} contains {max(ids)}; this model's {vocabulary} has ids 0 to {vocabulary_size - 1}"
            )
        return ids

    def read(
        self, where: str, item: pb.Input, tokenizer: Tokenizer, vocabulary_size: int, vocabulary: str = "vocabulary"
    ) -> Sequence[int]:
        """The ids of a text, or those that were given; at least one."""
        kind = item.WhichOneof("kind")
        if kind == "text":
            ids: Sequence[int] = tokenizer.encode(self.text(f"{where}.text", item.text))
        elif kind == "token_ids":
            ids = self.token_ids(f"{where}.token_ids", item.token_ids.ids, vocabulary_size, vocabulary)
        elif kind == "features":
            raise InvalidRequest(f"{where} has features, but model {self.model} reads text: give text or token_ids")
        else:
            raise InvalidRequest(f"{where} is empty: give text or token_ids")
        if not ids:
            raise InvalidRequest(f"{where} has no tokens; there is nothing to {self.purpose}")
        return ids
