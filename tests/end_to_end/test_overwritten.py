"""Somebody writes over the weights of a model that is served, in place, as `cp` does: it goes on answering as before,
and says what is wrong on disk."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import grpc

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc, open_inference_pb2
from tests.support.processes import PATIENCE, ROOT, eventually, serving

TEXTS = ("Save the file.", "The window could not be opened.", "Where is the station?")


def test_weights_may_be_overwritten_while_they_are_served(tmp_path: Path) -> None:
    (newest,) = (ROOT / "model_repo" / "en-de").glob("[0-9]*")
    folder = Path(shutil.copytree(newest, tmp_path / "repo" / "en-de" / newest.name))
    weights = folder / "weights.bin"
    content = weights.read_bytes()
    options = ("--repo", str(tmp_path / "repo"), "--threads", "1", "--max-slots", "4", "--watch", "0.1")
    with serving(tmp_path / "log.txt", *options) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)

        def translated() -> list[str]:
            request = pb.TranslateRequest(inputs=[pb.Input(text=text) for text in TEXTS])
            return [each.hypotheses[0].text for each in stub.Translate(request, timeout=PATIENCE).translations]

        def reason() -> str:
            index = channel.unary_unary(
                "/inference.GRPCInferenceService/RepositoryIndex",
                open_inference_pb2.RepositoryIndexRequest.SerializeToString,
                open_inference_pb2.RepositoryIndexResponse.FromString,
            )
            (model,) = index(open_inference_pb2.RepositoryIndexRequest()).models
            assert model.state == "READY"
            return str(model.reason)

        expected = translated()
        over, answers, failures = threading.Event(), list[list[str]](), list[Exception]()

        def keep_asking() -> None:
            try:
                while not over.is_set():
                    answers.append(translated())
            except Exception as error:  # the process is gone
                failures.append(error)

        asking = threading.Thread(target=keep_asking)
        asking.start()
        with weights.open("r+b") as file:  # the same file, as those who have it mapped see it
            file.truncate(0)
            eventually(lambda: len(answers) >= 3 or bool(failures), "answers while the file is empty")
            file.write(b"\xff" * len(content))
        eventually(lambda: "weights.bin is corrupt" in reason(), "the watcher sees it")
        over.set()
        asking.join()
        assert not failures
        assert translated() == expected
        assert all(answer == expected for answer in answers)
        # The score graph is opened now, for the first time.
        scored = stub.Score(pb.ScoreRequest(sources=[pb.Input(text=TEXTS[0])], texts=[pb.Input(text=expected[0])]))
        assert scored.scores[0].perplexity < 3
        weights.write_bytes(content)
        eventually(lambda: reason() == "", "what is whole again is no problem any more")
        assert server.process.poll() is None
