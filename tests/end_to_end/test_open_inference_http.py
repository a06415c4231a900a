"""/v2 of a real server, asked by the clients that others ship: their answers are those of gRPC."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.benchmarks.environments import python_of
from tests.support.processes import PATIENCE, ServerProcess, serving
from tests.support.shipped import shipped

pytestmark = pytest.mark.full

MODEL = "en-de-gru"
LINES = ["Save the file.", "Close the window.", "Größe: 3 €"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Versions 4 and 5 of one model, which are the same."""
    folder = tmp_path_factory.mktemp("http")
    for version in (4, 5):
        copied = folder / "repo" / MODEL / str(version)
        shutil.copytree(shipped(MODEL), copied)
        manifest = json.loads((copied / "manifest.json").read_text())
        (copied / "manifest.json").write_text(json.dumps({**manifest, "version": version}))
    with serving(folder / "log.txt", "--repo", str(folder / "repo"), "--threads", "1") as running:
        yield running
        assert "Traceback" not in (folder / "log.txt").read_text()


def session(peer: str, name: str, *arguments: str) -> Any:
    try:
        python = python_of(peer)
    except subprocess.CalledProcessError:
        pytest.skip(f"{peer} can't be installed here")
    program = Path(__file__).with_name(name)
    done = subprocess.run(
        [str(python), str(program), *arguments], capture_output=True, text=True, timeout=3 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def over_grpc(server: ServerProcess, tensor: Any, **parameters: Any) -> dict[str, Any]:
    names = ("text", "score", "token_ids")
    client = triton.InferenceServerClient(server.grpc)
    try:
        wanted = [triton.InferRequestedOutput(name) for name in names]
        found = client.infer(MODEL, [tensor], outputs=wanted, parameters=parameters)
        text = [[each.decode() for each in row] for row in found.as_numpy("text")]
        return {"text": text, **{name: found.as_numpy(name).tolist() for name in names[1:]}}
    finally:
        client.close()


def test_triton_clients_get_what_grpc_answers(server: ServerProcess) -> None:
    tensor = triton.InferInput("text", [len(LINES)], "BYTES")
    tensor.set_data_from_numpy(np.array([line.encode() for line in LINES], dtype=np.object_))
    expected = over_grpc(server, tensor, beam_size=4, num_hypotheses=2)
    ids = [7, 8, 9, 2]
    tensor_of_ids = triton.InferInput("token_ids", [1, len(ids)], "INT64")
    tensor_of_ids.set_data_from_numpy(np.array([ids], dtype=np.int64))
    expected_of_ids = over_grpc(server, tensor_of_ids)
    found = session("triton_http", "triton_http_session.py", server.http, MODEL, json.dumps(ids))
    for one, other in ((found["texts"], expected), (found["ids"], expected_of_ids)):
        assert one["text"] == other["text"]
        assert np.array(one["score"]) == pytest.approx(np.array(other["score"]), abs=1e-4)
    assert found["texts"]["token_ids"] == expected["token_ids"]
    assert [row[0] for row in found["aio"]["text"]] == [row[0] for row in expected["text"]]


def test_kserves_client_gets_it_too(server: ServerProcess) -> None:
    tensor = triton.InferInput("text", [2], "BYTES")
    tensor.set_data_from_numpy(np.array([line.encode() for line in LINES[:2]], dtype=np.object_))
    expected = [row[0] for row in over_grpc(server, tensor, beam_size=4)["text"]]
    assert session("kserve_client", "kserve_session.py", server.http, MODEL) == [expected] * 4
