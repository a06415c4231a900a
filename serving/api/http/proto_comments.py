"""What beamline.proto says of its messages, fields and methods, for the OpenAPI description: it is written once."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_BLOCK = re.compile(r"(?:message|service|enum)\s+(\w+)\s*\{")
_METHOD = re.compile(r"rpc\s+(\w+)\(")
_FIELD = re.compile(r"(?:optional |repeated )?[\w.<>, ]+?\s+(\w+)\s*=\s*\d+;")


@cache
def comments() -> dict[str, str]:
    """By `Message`, `Message.field` and `Service.Method`: the comment lines above, or the comment behind it."""
    found: dict[str, str] = {}
    above: list[str] = []
    block = ""
    text = resources.files("beamline.protos").joinpath("beamline.proto").read_text(encoding="utf-8")
    for line in map(str.strip, text.splitlines()):
        code, _, behind = (part.strip() for part in line.partition("//"))
        if not code:
            above = [*above, behind] if behind else []
            continue
        said = " ".join(above) or behind
        above = []
        if match := _BLOCK.match(code):
            block = name = match[1]
        elif match := _METHOD.match(code) or _FIELD.match(code):
            name = f"{block}.{match[1]}"
        else:
            continue
        if said:
            found[name] = said
    return found
