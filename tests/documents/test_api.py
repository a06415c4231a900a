"""docs/api.md has every call, every field and every limit of the contract, and no other."""

from __future__ import annotations

import re

import pytest

from beamline.client import Client
from beamline.protos import beamline_pb2 as pb
from beamline.serving.api.http.endpoints import ENDPOINTS
from beamline.serving.api.http.errors import _HTTP_CODES
from beamline.serving.api.status import StatusCode
from beamline.serving.config import ServeConfig, TextLimits
from beamline.serving.contract.backend import REPORTED
from beamline.serving.text import generator, options, scoring
from docs.api_tables import declared, page
from tests.documents.pages import blocks, text_of

PAGE = "docs/api.md"
FILE = pb.DESCRIPTOR
DECLARED = declared()
SERVICE = FILE.services_by_name["Inference"]


def test_the_tables_are_current() -> None:
    assert page(text_of(PAGE)) == text_of(PAGE), "docs/api.md is not what protos/beamline.proto gives: run 'make docs'"


def test_every_message_and_enum_has_its_table() -> None:
    tables = re.findall(r"<!-- fields of (\w+) -->", text_of(PAGE))
    assert sorted(tables) == sorted([*FILE.message_types_by_name, *FILE.enum_types_by_name])


def test_no_field_is_missing_from_a_table() -> None:
    """The tables are made from the file's text, for its comments; the descriptors say whether all was seen."""
    for name, message in FILE.message_types_by_name.items():
        assert [row.name for row in DECLARED[name]] == [field.name for field in message.fields]
    for name, enum in FILE.enum_types_by_name.items():
        assert [row.name for row in DECLARED[name]] == [value.name for value in enum.values]


def test_comments_come_along() -> None:
    rows = {row.name: row for row in DECLARED["GenerationOptions"]}
    assert rows["beam_size"].comment == "1: no beam search"
    assert rows["logit_bias"].kind == "map<uint32, float>"
    assert {row.oneof for row in DECLARED["Input"]} == {"kind"}


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
def test_every_call_has_its_examples(method: str) -> None:
    section = text_of(PAGE).partition(f"\n## {method}\n")[2].partition("\n## ")[0]
    assert f"{SERVICE.full_name}/{method}" in section  # grpcurl
    endpoint = next(each for each in ENDPOINTS if method in (each.unary.name, each.stream and each.stream.name))
    streams = endpoint.stream is not None and endpoint.stream.name == method
    curl = next(line for line in section.replace("\\\n", "").splitlines() if line.strip().startswith("curl "))
    assert f"{endpoint.path} " in curl
    assert streams == ("text/event-stream" in curl)
    assert "```python\n" in section


def test_every_method_of_the_client_is_named() -> None:
    methods = {name for name in dir(Client) if not name.startswith("_")} - {"close"}
    for name in methods:
        assert f"`{name}`" in text_of(PAGE), f"docs/api.md does not name Client.{name}"
    used = {name for block in blocks(PAGE) for name in re.findall(r"(?:client|Client\(\))\.(\w+)\(", block.content)}
    assert used >= methods - {"chat_stream"}


def test_every_status_is_there_with_its_http_code() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|", text_of(PAGE), re.MULTILINE))
    expected = {code.name: str(_HTTP_CODES.get(code, 500)) for code in StatusCode}
    del expected["OK"], expected["UNKNOWN"]
    assert rows == expected


def test_the_limits_are_those_of_the_code() -> None:
    section = text_of(PAGE).partition("\n## Limits\n")[2].partition("\n## ")[0]
    rows = {what: int(most.replace(",", "")) for what, most in re.findall(r"^\| (.+?) \| ([\d,]+) \|", section, re.M)}
    text = TextLimits()
    assert rows == {
        "inputs of a call": text.max_inputs,
        "bytes of one text": text.max_text_bytes,
        "parts of a call, where texts are split": text.max_sequences,
        "bytes of one message (`RESOURCE_EXHAUSTED`)": ServeConfig().max_message_bytes,
        "texts of a Score": scoring._MAX_TEXTS,
        "tokens of a Score": scoring._MAX_TOKENS,
        "messages of a chat": generator._MAX_MESSAGES,
        "`stop` strings": options.MAX_STOPS,
        "characters of a `stop` string": options.MAX_STOP_LENGTH,
        "entries of `logit_bias`": options.MAX_BIASED,
        "ids of `suppress_tokens`": options.MAX_SUPPRESSED,
        "`top_k`": options.TOP_K,
        "`top_log_probs`": REPORTED,
        "tokens that a reader of a stream may be behind (`RESOURCE_EXHAUSTED`)": text.max_unread_tokens,
    }
    ranges = section.rpartition("|\n")[2]
    for name, bounds in (
        ("length_penalty", options.LENGTH_PENALTY),
        ("repetition_penalty", options.REPETITION_PENALTY),
        ("frequency_penalty", options.PENALTY),
    ):
        assert re.search(rf"`{name}` {bounds[0]:g} to {bounds[1]:g}|`{name}` is {bounds[0]:g} to {bounds[1]:g}", ranges)
    assert f"`temperature` 0 or {options.TEMPERATURE[0]:g} to {options.TEMPERATURE[1]:g}" in ranges
