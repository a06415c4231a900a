"""The trace of the search on the wire: read from nothing but the messages, it gives the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import pytest

from beamline import AsyncClient
from beamline.errors import InvalidRequest
from beamline.serving.config import ServeConfig
from beamline.serving.server import Server
from beamline.types import SearchStep, SearchTrace, Translation
from tests.serving.doubles import started
from tests.serving.fake_lm import GatedEngine, serving
from tests.support.processes import ROOT

TEXT = "The file could not be opened."


def replayed(trace: SearchTrace, steps: Sequence[SearchStep]) -> list[tuple[list[int], float]]:
    found = []
    for number, place in trace.hypotheses:
        end = steps[number].candidates[place]
        assert end.fate == "finished"
        tokens: list[int] = []
        for step in reversed(steps[: number + 1]):
            candidate = step.candidates[place]
            tokens += [] if candidate.id is None else [candidate.id]
            place = candidate.parent
        found.append((tokens[::-1], end.normalized_score))
    return found


def check(translation: Translation, steps: Sequence[SearchStep]) -> None:
    (trace,) = translation.search_traces
    told = replayed(trace, steps)
    assert [tokens for tokens, _ in told] == [[token.id for token in each.tokens] for each in translation.hypotheses]
    assert [score for _, score in told] == [each.score for each in translation.hypotheses]
    finished = sorted(
        (each.normalized_score for step in steps for each in step.candidates if each.fate == "finished"), reverse=True
    )
    assert [score for _, score in told] == finished[: len(told)]


async def test_the_shipped_models_search_can_be_replayed() -> None:
    config = ServeConfig(
        repository=ROOT / "model_repo", grpc_port=0, metrics_port=0, http_port=0, threads=1, engines=1, load=("en-de",)
    )
    async with (
        started(Server(config)) as server,
        AsyncClient(server.grpc_address) as client,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as gateway,
    ):
        for beams in (1, 2, 4, 16):
            asked: dict[str, Any] = {
                "beam_size": beams, "num_hypotheses": beams, "return_scores": True, "return_tokens": True,
            }  # fmt: skip
            plain = await client.translate(TEXT, **asked)
            found = await client.translate(TEXT, **asked, return_search_trace=True)
            assert plain.search_traces == ()
            assert plain.hypotheses == found.hypotheses
            (trace,) = found.search_traces
            assert (trace.beam_size, trace.samples, trace.truncated) == (beams, False, False)
            assert max(len(step.candidates) for step in trace.steps) == 2 * beams
            check(found, trace.steps)

            pieces = [piece async for piece in client.translate_stream(TEXT, **asked, return_search_trace=True)]
            steps = [step for piece in pieces for step in piece.search_steps]
            assert [step.number for step in steps] == list(range(len(steps)))
            last = pieces[-1].translation
            assert last is not None
            assert last.search_traces[0].steps == ()
            check(last, steps)

        parts = await client.translate(f"{TEXT} {TEXT}", split_sentences=True, return_search_trace=True)
        assert [{step.part for step in trace.steps} for trace in parts.search_traces] == [{0}, {1}]
        with pytest.raises(InvalidRequest, match=r"at most 16 sequences of a call, and this one has 20"):
            await client.translate(" ".join([TEXT] * 20), split_sentences=True, return_search_trace=True)

        body = {"inputs": [{"text": TEXT}], "options": {"return_search_trace": True, "beam_size": 2}}
        answer = (await gateway.post("/v1/translate", json=body)).json()
        (in_json,) = answer["translations"][0]["search_traces"]
        assert in_json["steps"][0]["candidates"][0]["fate"] == "SEARCH_FATE_LIVE"
        events = (await gateway.post("/v1/translate", json=body, headers={"accept": "text/event-stream"})).text
        data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
        assert [step for event in data for step in event.get("search_steps", [])] == in_json["steps"]


async def test_a_language_models_samples_can_be_replayed() -> None:
    async with serving(GatedEngine(slots=2)) as server, AsyncClient(server.grpc_address) as client:
        samples: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5}
        beams: dict[str, Any] = {"n": 2, "beam_size": 4}
        for options in (samples, beams):
            asked = {**options, "max_tokens": 8, "return_tokens": True, "return_search_trace": True}
            found = await client.generate("hello", **asked)
            trace = found.search_trace
            assert trace is not None
            assert trace.samples is ("temperature" in options)
            ids = [[token.id for token in each.tokens] for each in found.completions]
            assert [tokens for tokens, _ in replayed(trace, trace.steps)] == ids
            pieces = [piece async for piece in client.generate_stream("hello", **asked)]
            assert tuple(step for piece in pieces for step in piece.search_steps) == trace.steps
            assert pieces[-1].search_trace is not None
            assert pieces[-1].search_trace.hypotheses == trace.hypotheses
            assert (await client.generate("hello", **options)).search_trace is None
