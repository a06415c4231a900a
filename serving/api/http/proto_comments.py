"""What beamline.proto says of its messages, fields and methods: it is written once, and read by the OpenAPI description
and by the tables of docs/api.md."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

_BLOCK = re.compile(r"(message|service|enum) (\w+) \{")
_ONEOF = re.compile(r"oneof (\w+) \{")
_METHOD = re.compile(r"rpc (\w+)\(")
_FIELD = re.compile(r"(optional |repeated )?([\w.]+|map<[^>]+>) (\w+) = \d+;")
_VALUE = re.compile(r"(\w+) = \d+;")


@dataclass(frozen=True)
class Member:
    """A field, the value of an enum, or a method."""

    name: str
    kind: str = ""  # a field's type, with `repeated`
    comment: str = ""
    oneof: str = ""  # the one that it belongs to


@dataclass(frozen=True)
class Declaration:
    """A message, an enum or a service."""

    keyword: str
    comment: str
    members: list[Member] = field(default_factory=list)


@cache
def declarations() -> dict[str, Declaration]:
    """By name, in the file's order. A comment stands behind what it is about, or in lines of its own above it."""
    found: dict[str, Declaration] = {}
    above: list[str] = []
    members: list[Member] = []
    oneof = ""
    text = resources.files("beamline.protos").joinpath("beamline.proto").read_text(encoding="utf-8")
    for line in map(str.strip, text.splitlines()):
        code, _, behind = (part.strip() for part in line.partition("//"))
        if not code:
            above = [*above, behind] if behind else []
            continue
        said, above = behind or " ".join(above), []
        if block := _BLOCK.match(code):
            declared = found[block[2]] = Declaration(block[1], said)
            members = declared.members
        elif begins := _ONEOF.match(code):
            oneof = begins[1]
        elif code == "}":
            oneof = ""
        elif method := _METHOD.match(code):
            members.append(Member(method[1], comment=said))
        elif typed := _FIELD.match(code):
            label, kind, name = typed.groups()
            members.append(Member(name, f"{'repeated ' if label == 'repeated ' else ''}{kind}", said, oneof))
        elif value := _VALUE.match(code):
            members.append(Member(value[1], comment=said))
    return found


def comments() -> dict[str, str]:
    """By `Message`, `Message.field` and `Service.Method`, where there is one."""
    found = {name: declared.comment for name, declared in declarations().items()}
    for name, declared in declarations().items():
        found |= {f"{name}.{member.name}": member.comment for member in declared.members}
    return {name: comment for name, comment in found.items() if comment}
