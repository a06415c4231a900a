"""Lists of any length, items that are at fault, and options that are wrong."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any, get_type_hints

import grpc
import pytest

from beamline import AsyncClient, Client, load, types
from beamline.errors import BeamlineError, Cancelled, InternalError, InvalidItem, InvalidRequest, ModelNotFound
from beamline.protos import beamline_pb2 as pb
from beamline.serving.engine.request import Request
from beamline.serving.errors import ComputeError
from beamline.types import Features, Message, TokenIds
from tests.client.callers import Refusal, Scripted, scripted, texts
from tests.client.conftest import MakeCaller
from tests.serving.doubles import EngineDouble, echo, running
from tests.serving.fake_lm import GatedEngine, serving

MANY = [f"text {number}" for number in range(1100)]  # more than a server takes in one call


async def test_a_long_list_is_sent_in_small_calls_and_answered_in_order(caller: MakeCaller) -> None:
    servicer = Scripted()
    async with scripted(servicer) as target:
        assert texts(await caller(target)("translate", MANY)) == MANY
    sizes = [len(call.inputs) for call in servicer.calls]
    assert max(sizes) == 16
    assert sum(sizes) == len(MANY)
    assert sorted(item.text for call in servicer.calls for item in call.inputs) == sorted(MANY)


async def test_long_texts_are_few_in_a_call(caller: MakeCaller) -> None:
    servicer = Scripted()
    given = ["a" * 600_000, "b" * 600_000, "c", "d" * 1_200_000, "e"]
    async with scripted(servicer) as target:
        assert texts(await caller(target)("translate", given)) == given
    assert sorted([len(item.text) for item in call.inputs] for call in servicer.calls) == [
        [600_000],
        [600_000, 1, 1],
        [1_200_000],
    ]


async def test_no_more_items_than_asked_for_are_with_the_server(caller: MakeCaller) -> None:
    engine = EngineDouble()
    async with running(engine) as server:
        assert texts(await caller(server.grpc_address, in_flight=1)("translate", MANY[:64])) == MANY[:64]
    assert engine.most_waiting == 1


async def test_a_bad_item_is_named_by_its_place_in_the_list(caller: MakeCaller) -> None:
    given = [*MANY[:50], " ", *MANY[50:100]]
    async with running(EngineDouble()) as server:
        client = caller(server.grpc_address)
        with pytest.raises(InvalidItem) as found:
            await client("translate", given)
        assert found.value.index == 50
        assert str(found.value) == "item 50 is empty; there is nothing to translate"
        with pytest.raises(InvalidItem) as found:
            await client("translate", ["a", 7])
        assert (found.value.index, str(found.value)) == (
            1,
            "item 1: the text is of type int; give a string, TokenIds or Features",
        )
        with pytest.raises(InvalidItem) as found:
            await client.pieces("translate_stream", ["a", ""])
        assert found.value.index == 1
        with pytest.raises(InvalidRequest, match=r"^the text is empty; there is nothing to translate$"):
            await client("translate", "")
        with pytest.raises(InvalidItem) as found:
            await client("score", ["a", "", "c"], source="a")
        assert found.value.index == 1
    again = pickle.loads(pickle.dumps(found.value))
    assert (again.index, str(again)) == (1, str(found.value))


async def test_errors_are_returned_in_their_places(caller: MakeCaller) -> None:
    given: list[Any] = list(MANY[:50])
    for place in (0, 3, 17, 49):
        given[place] = ""
    given[18] = "\ud800"
    async with running(EngineDouble()) as server:
        client = caller(server.grpc_address)
        found = await client("translate", given, return_errors=True)
        for place, (text, answer) in enumerate(zip(given, found, strict=True)):
            if place in (0, 3, 17, 18, 49):
                assert isinstance(answer, InvalidItem)
                assert answer.index == place
            else:
                assert answer.text == text
        # What would be so for every item is raised.
        with pytest.raises(InvalidRequest, match=r"^beam_size is 99; this model allows 1 to 8"):
            await client("translate", ["a", "b"], beam_size=99, return_errors=True)
        with pytest.raises(ModelNotFound):
            await client("translate", ["a", "b"], model="nonesuch", return_errors=True)


async def test_what_keeps_every_item_from_being_answered_is_raised(caller: MakeCaller) -> None:
    engine = EngineDouble(held=True)
    async with running(engine) as server:
        client = caller(server.grpc_address)
        task = asyncio.ensure_future(client("translate", ["a", "b"], return_errors=True))
        await engine.until(lambda: len(engine.submitted) == 2)
        await client.close()
        with pytest.raises(Cancelled, match="this client is closed"):
            await task
        with pytest.raises(BeamlineError, match="this client is closed"):
            await client("translate", ["a", "b"], return_errors=True)


async def test_an_item_that_is_named_in_the_middle_of_a_sentence(caller: MakeCaller) -> None:
    said = "num_hypotheses is 2, but inputs[1].text was split into 3 parts"
    given = ["short", "the longest goes first"]
    async with scripted(Scripted(*[Refusal(grpc.StatusCode.INVALID_ARGUMENT, said)] * 2)) as target:
        client = caller(target)
        with pytest.raises(InvalidItem, match=r"^num_hypotheses is 2, but item 0 was split into 3 parts$"):
            await client("translate", given)
        bad, good = await client("translate", given, return_errors=True)
    assert (bad.index, good.text) == (0, given[1])


async def test_an_item_that_is_larger_than_a_message_may_be(caller: MakeCaller) -> None:
    async with scripted(Scripted()) as target:  # which takes 4 MiB
        client = caller(target)
        good, bad = await client("translate", ["a", "b" * 5_000_000], return_errors=True)
        assert good.text == "a"
        assert isinstance(bad, InvalidItem)
        assert str(bad).startswith("item 1: the call is larger than the server takes")
        with pytest.raises(InvalidRequest, match=r"^the call is larger") as found:
            await client("translate", "b" * 5_000_000)
        assert type(found.value) is InvalidRequest


async def test_a_source_that_can_not_be_sent(caller: MakeCaller) -> None:
    async with running(EngineDouble()) as server:
        client = caller(server.grpc_address)
        good, bad = await client("score", ["a", "b"], source=["x", None], return_errors=True)
        assert good.scored_tokens == 2
        assert bad.index == 1
        with pytest.raises(InvalidItem, match="source of item 1: the text is of type NoneType"):
            await client("score", ["a", "b"], source=["x", None])
        with pytest.raises(InvalidRequest, match="lone surrogates"):
            await client("score", ["a", "b"], source="\ud800")


async def test_what_fails_inside_the_server_fails_alone(caller: MakeCaller) -> None:
    def answer(request: Request) -> Any:
        return ComputeError("not a number") if len(request.source) > 6 else echo(request)

    given = ["a"] * 20
    given[7] = "a longer text"
    async with running(EngineDouble(answer=answer)) as server:
        client = caller(server.grpc_address)
        answers = await client("translate", given, return_errors=True)
        assert isinstance(answers.pop(7), InternalError)
        assert texts(answers) == ["a"] * 19
        with pytest.raises(InternalError, match="could not compute this request"):
            await client("translate", given)


async def test_prompts_too(caller: MakeCaller) -> None:
    async with serving(GatedEngine()) as server:
        client = caller(server.grpc_address)
        long = "a" * 5000
        with pytest.raises(InvalidItem) as found:
            await client("generate", ["a", long], max_tokens=4)
        assert found.value.index == 1
        good, bad, worse = await client("generate", ["a", long, 3.5], max_tokens=4, return_errors=True)
        assert good.text
        assert isinstance(bad, InvalidItem)
        assert isinstance(worse, InvalidItem)
        for more in ({"temperature": 1000.0}, {"top_p": 7.0}):
            with pytest.raises(InvalidRequest, match=rf"^{next(iter(more))} is ") as wrong:
                await client("generate", ["a", "b"], return_errors=True, **more)
            assert type(wrong.value) is InvalidRequest
        with pytest.raises(InvalidRequest, match="message 1 of the chat"):
            await client("chat", [Message("user", "a"), {"role": "user"}])
        with pytest.raises(InvalidRequest, match="message 0 of the chat"):
            await client("chat", [{"role": "user", "content": None}])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beam_size": -1}, "beam_size is -1; it must be a whole number from 1 on, as far as the model allows"),
        ({"beam_size": "4"}, "beam_size is '4'; it must be a whole number from 1 on, as far as the model allows"),
        ({"top_k": -1}, "top_k is -1; it must be a whole number from 0 to 4294967295"),
        ({"length_penalty": "long"}, "length_penalty is 'long'; it must be a number"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'; it must be one of False, True, 'never'"),
        ({"suppress_tokens": [-1]}, "suppress_tokens is [-1]; it must be a list of token ids, each a whole number"),
        ({"target_prefix": 3}, "target_prefix is 3; it must be a text"),
        ({"timeout": 0}, "timeout is 0; it must be seconds, more than 0"),
        ({"priority": 9}, "priority is 9; it must be a whole number from 0"),
        ({"queue_timeout": -1}, "queue_timeout is -1; it must be seconds"),
    ],
)
async def test_a_wrong_option_is_named_before_anything_is_sent(
    caller: MakeCaller, options: dict[str, Any], sentence: str
) -> None:
    client = caller("127.0.0.1:1")
    with pytest.raises(InvalidRequest) as found:
        await client("translate", "a", **options)
    assert str(found.value).startswith(sentence)


def test_an_unknown_argument_is_a_type_error_that_says_what_is_known() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got .* 'host'; it knows target, token, tls, "):
            kind(host="localhost")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^load\(\) got .* 'inter_threads'; it knows path, version, "):
        load("model_repo/en-de", inter_threads=2)  # type: ignore[call-arg]


async def test_an_unknown_option_is_a_type_error_that_says_what_is_known(caller: MakeCaller) -> None:
    client = caller("127.0.0.1:1")
    with pytest.raises(TypeError, match=r"'beam'; it knows beam_size, "):
        await client("translate", "a", beam=4)
    with pytest.raises(TypeError, match=r"'temperature'; it knows "):
        await client("embed", "a", temperature=1)
    with pytest.raises(InvalidRequest, match="rows of features have lengths"):
        await client("translate", Features([[1.0], [1.0, 2.0]]))
    with pytest.raises(InvalidRequest, match="ids must be whole numbers"):
        await client("generate", TokenIds([-1]))


async def test_priority_and_queue_timeout_travel_as_metadata(caller: MakeCaller) -> None:
    servicer = Scripted()
    async with scripted(servicer) as target:
        await caller(target)("translate", "a", priority=3, queue_timeout=1.5)
    assert servicer.metadata[0]["x-beamline-priority"] == "3"
    assert servicer.metadata[0]["x-beamline-queue-timeout-ms"] == "1500"


@pytest.mark.parametrize(
    ("ours", "theirs", "beside"),
    [
        (types.TranslateOptions, pb.DecodingOptions, {"source_language", "target_language"}),
        (types.GenerateOptions, pb.GenerationOptions, set()),
        (types.ClassifyOptions, pb.ClassifyRequest, set()),
        (types.EmbedOptions, pb.EmbedRequest, set()),
    ],
)
def test_the_options_are_the_contracts(ours: type, theirs: Any, beside: set[str]) -> None:
    named = set(get_type_hints(ours)) - set(get_type_hints(types.CallOptions)) - beside
    assert named == {field.name for field in theirs.DESCRIPTOR.fields} - {"model", "version", "inputs"}
