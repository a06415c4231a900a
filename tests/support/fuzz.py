"""Random messages for any protobuf type, valid or spoiled, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_F = FieldDescriptor
_TEXTS = (
    "", " ", "a", "a value", "fake", "../../etc/passwd", "en-de", "1", "-1", "\x00", "\ufeff", "😀" * 5, "ü" * 40,
    "Hello. World! " * 3, "%s%n", "x" * 300, "text", "score", "BYTES", "FP32", "INT64", "inputs", "9" * 30,
    "mood", "token_ids", "label", "probability", "embedding", "top_k", "pooling", "mean", "normalize", "truncate",
)  # fmt: skip
_NUMBERS = (0, 1, 2, 3, 4, 7, 16, 17, 255, 1000, 2**31 - 1, 2**32 - 1, 2**63 - 1)
_REALS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
_DEPTH = 4


class Fuzz:
    def __init__(self, seed: int, corpus: Sequence[Message] = ()) -> None:
        """`corpus`: messages that are as they should be. Half of those of their types are made from them."""
        self.random = random.Random(seed)
        self._corpus: dict[str, list[bytes]] = {}
        for message in corpus:
            self._corpus.setdefault(message.DESCRIPTOR.name, []).append(message.SerializeToString())

    def request(self, descriptor: Descriptor) -> Message:
        """Any message of that type, or a good one with something changed."""
        known = self._corpus.get(descriptor.name)
        if not known or self.random.random() < 0.5:
            return self.message(descriptor)
        made = GetMessageClass(descriptor).FromString(self.random.choice(known))
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            self._change(made)
        return made

    def _change(self, made: Any) -> None:
        """One field, of the message itself or of one inside it."""
        inside = [
            each
            for field, value in made.ListFields()
            if field.message_type is not None and not field.message_type.GetOptions().map_entry
            for each in (value if field.is_repeated else [value])
        ]
        if inside and self.random.random() < 0.6:
            return self._change(self.random.choice(inside))
        if not made.DESCRIPTOR.fields:
            return None
        field = self.random.choice(made.DESCRIPTOR.fields)
        if self.random.random() < 0.5:
            made.ClearField(field.name)
        return self._fill(made, field, 0)

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """Of that type, with random fields, many of them absurd."""
        made = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if depth < _DEPTH and self.random.random() < 0.6:
                self._fill(made, field, depth)
        return made

    def _fill(self, made: Any, field: FieldDescriptor, depth: int) -> None:
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            for _ in range(self.random.randrange(3)):
                self._entry(getattr(made, field.name), kind, depth)
        elif field.is_repeated:
            for _ in range(self.random.choice((0, 1, 1, 2, 5))):
                if kind is not None:
                    getattr(made, field.name).append(self.message(kind, depth + 1))
                else:
                    getattr(made, field.name).append(self._value(field))
        elif kind is not None:
            getattr(made, field.name).CopyFrom(self.message(kind, depth + 1))
        else:
            setattr(made, field.name, self._value(field))

    def _entry(self, entries: Any, kind: Descriptor, depth: int) -> None:
        key, value = self._value(kind.fields_by_name["key"]), kind.fields_by_name["value"]
        if value.message_type is not None:
            entries[key].CopyFrom(self.message(value.message_type, depth + 1))
        else:
            entries[key] = self._value(value)

    def _value(self, field: FieldDescriptor) -> Any:
        if field.enum_type is not None:
            return self.random.choice([*(value.number for value in field.enum_type.values), 99])
        if field.type == _F.TYPE_STRING:
            return self.random.choice(_TEXTS)
        if field.type == _F.TYPE_BYTES:
            return self.random.choice(_TEXTS).encode() + self.random.randbytes(self.random.choice((0, 0, 1, 4, 8, 64)))
        if field.type == _F.TYPE_BOOL:
            return self.random.random() < 0.5
        if field.type in (_F.TYPE_FLOAT, _F.TYPE_DOUBLE):
            return self.random.choice(_REALS)
        signed = field.type in (_F.TYPE_INT32, _F.TYPE_INT64, _F.TYPE_SINT32, _F.TYPE_SINT64)
        wide = field.type in (_F.TYPE_INT64, _F.TYPE_UINT64, _F.TYPE_SINT64)
        number = self.random.choice(_NUMBERS) % (2**63 if wide else 2**31)
        return -number if signed and self.random.random() < 0.3 else number

    def spoiled(self, data: bytes) -> bytes:
        """Some of its bytes changed, lost, or doubled."""
        found = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 5))):
            place = self.random.randrange(len(found) + 1)
            action = self.random.randrange(4)
            if action == 0:
                found[place:place] = self.random.randbytes(self.random.randrange(1, 9))
            elif action == 1:
                del found[place : place + self.random.randrange(1, 9)]
            elif action == 2:
                found[place:place] = found[place : place + self.random.randrange(1, 33)]
            elif place < len(found):
                found[place] ^= 1 << self.random.randrange(8)
        return bytes(found)

    def data(self, descriptor: Descriptor) -> bytes:
        """A message on the wire: as it should be, spoiled, or no message at all."""
        chance = self.random.random()
        if chance < 0.05:
            return self.random.randbytes(self.random.randrange(100))
        made = self.request(descriptor).SerializeToString()
        return made if chance < 0.6 else self.spoiled(made)
