from __future__ import annotations

import argparse
import asyncio
import io
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.cli import main
from beamline.serving.commands import translate
from beamline.serving.commands.client import Client
from tests.serving.doubles import EngineDouble, running


async def ask(engine: EngineDouble, *arguments: str) -> int:
    async with running(engine) as server:
        line = ["translate", "--target", server.grpc_address, *arguments]
        return await asyncio.to_thread(main, line, {"translate": lambda: translate})


async def test_texts_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(EngineDouble(), "Hello there. Bye.", "zwei") == 0
    out, err = capsys.readouterr()
    assert out == "Hello there. Bye.\nzwei\n"
    assert err == ""


async def test_lines_from_a_file_stay_in_order_and_blank_ones_stay_blank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["" if number % 7 == 0 else f"line {number} ü" for number in range(200)]
    (tmp_path / "in").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert await ask(EngineDouble(), "--file", str(tmp_path / "in"), "--progress") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == lines
    assert "200 lines" in err


async def test_lines_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("eins\n\nzwei ß".encode())))
    assert await ask(EngineDouble()) == 0
    assert capsys.readouterr().out == "eins\n\nzwei ß\n"


async def test_scores_and_hypotheses(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(EngineDouble(), "--scores", "--nbest", "2", "--beam", "3", "One is. Two.") == 0
    assert capsys.readouterr().out == "-1.0000\tOne is. Two.\n-2.0000\tOne is. Two.\n"


async def test_a_refusal_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(EngineDouble(), "--beam", "9", "a") == 2
    assert capsys.readouterr().err == "beamline: beam_size is 9; this model allows 1 to 8 (INVALID_ARGUMENT)\n"


def test_no_server_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--target", "127.0.0.1:1", "a"], {"translate": lambda: translate}) == 2
    assert capsys.readouterr().err.startswith("beamline: the server at 127.0.0.1:1 is not available: ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--file", "/nowhere", "a"], "give texts or --file, not both"),
        (["--file", "/nowhere"], "/nowhere can't be read: No such file or directory"),
        (["--beam", "0", "a"], "--beam is 0; it must be at least 1"),
        (["a", ""], "a TEXT is empty; give words"),
        ([" "], "a TEXT is empty; give words"),
        (["--nbest", "-1", "a"], "--nbest is -1; it must be at least 1"),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", *arguments], {"translate": lambda: translate}) == 2
    assert sentence in capsys.readouterr().err


def test_input_that_is_not_utf8_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_bytes(b"\xff\n")
    assert main(["translate", "--file", str(tmp_path / "in")], {"translate": lambda: translate}) == 2
    assert "not UTF-8" in capsys.readouterr().err


def question(*arguments: str) -> pb.TranslateRequest:
    parser = argparse.ArgumentParser()
    translate.add_arguments(parser)
    return translate.question(parser.parse_args(arguments), "text")


def test_what_is_not_given_is_left_to_the_model() -> None:
    options = question().options
    assert not options.HasField("beam_size")
    assert not options.HasField("num_hypotheses")
    assert options.split_sentences


def test_splitting_is_off_where_it_makes_no_sense() -> None:
    assert not question("--no-split").options.split_sentences
    assert not question("--nbest", "2").options.split_sentences
    assert question("--nbest", "1").options.split_sentences


async def test_a_full_queue_is_tried_again() -> None:
    engine = EngineDouble(capacity=0)

    def translated(address: str) -> list[str]:
        def ask(line: str) -> pb.TranslateRequest:
            return pb.TranslateRequest(inputs=[pb.Input(text=line)])

        with Client(address) as client:
            answers = client.translate(["a"], ask)
            return [answer.hypotheses[0].text for answer in answers if isinstance(answer, pb.Translation)]

    async with running(engine) as server:
        task = asyncio.create_task(asyncio.to_thread(translated, server.grpc_address))
        await engine.until(lambda: engine.refused > 0)
        engine.capacity = 10
        assert await task == ["a"]


def test_the_client_keeps_its_window_full_while_a_line_takes_long() -> None:
    """Of 20 lines, four at a time, the first is answered when 15 others have been sent. Answers come in order."""
    sent, lock, most = list[str](), threading.Lock(), [0]
    enough, waiting = threading.Event(), set[str]()

    def answered(request: pb.TranslateRequest) -> pb.TranslateResponse:
        text = request.inputs[0].text
        if text == "0":
            assert enough.wait(60)
        with lock:
            waiting.remove(text)
        return pb.TranslateResponse(translations=[pb.Translation(hypotheses=[pb.Hypothesis(text=text)])])

    class Method:
        def future(self, request: pb.TranslateRequest, metadata: object) -> Future[pb.TranslateResponse]:
            with lock:
                sent.append(request.inputs[0].text)
                waiting.add(request.inputs[0].text)
                most[0] = max(most[0], len(waiting))
            if len(sent) == 16:
                enough.set()
            return pool.submit(answered, request)

    lines = [str(number) for number in range(20)]
    with ThreadPoolExecutor(4) as pool, Client("127.0.0.1:1", window=4) as client:
        client._stub.Translate = Method()
        question = lambda line: pb.TranslateRequest(inputs=[pb.Input(text=line)])  # noqa: E731
        answers = list(client.translate(lines, question))
    texts = [answer.hypotheses[0].text for answer in answers if isinstance(answer, pb.Translation)]
    assert texts == sent == lines
    assert most[0] == 4


def test_of_a_block_the_longest_line_is_sent_first_and_answers_come_in_order() -> None:
    sent = list[str]()

    class Method:
        def future(self, request: pb.TranslateRequest, metadata: object) -> Future[pb.TranslateResponse]:
            sent.append(request.inputs[0].text)
            answer = pb.Translation(hypotheses=[pb.Hypothesis(text=sent[-1])])
            done: Future[pb.TranslateResponse] = Future()
            done.set_result(pb.TranslateResponse(translations=[answer]))
            return done

    lines = ["aa", "", "a", "aaaa", "bbb", "b", "bbbbb"]
    with Client("127.0.0.1:1", window=4, block=4) as client:
        client._stub.Translate = Method()
        question = lambda line: pb.TranslateRequest(inputs=[pb.Input(text=line)])  # noqa: E731
        answers = list(client.translate(lines, question))
    assert sent == ["aaaa", "aa", "a", "bbbbb", "bbb", "b"]
    texts = [answer.hypotheses[0].text if isinstance(answer, pb.Translation) else "" for answer in answers]
    assert texts == lines


async def test_a_line_that_is_refused_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(f"eins\n{'x' * 1000}\ndrei\n", encoding="utf-8")
    assert await ask(EngineDouble(), "--file", str(tmp_path / "in"), "--no-split") == 1
    out, err = capsys.readouterr()
    assert out == "eins\n\ndrei\n"
    assert err.startswith("line 2: ")
    assert "inputs[0]" not in err
