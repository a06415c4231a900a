"""Chat messages as a prompt: the model's chat template, rendered in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from beamline.serving.errors import InvalidRequest, ModelError


class _Generation(Extension):
    """{% generation %}, by which templates mark what an assistant says: it is rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        # What is set inside is not seen outside, as theirs is a call.
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """As transformers renders it: the same settings, functions and names."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` by their names: bos_token, pad_token and so on."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise ModelError(f"the model's chat template can't be used: {error}") from error
        self._names = {"tools": None, "documents": None, **special_tokens}

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._names
            )
        except TemplateError as error:  # the template's own complaint among them: roles must alternate, and the like
            raise InvalidRequest(f"the model's chat template does not take these messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest("the model's chat template does not take these messages") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
