"""What a user of Triton does over HTTP, with tritonclient as it comes from PyPI: `python triton_http_session.py ADDRESS
MODEL`, where it is installed with all that it wants (`tritonclient[http]`).

The repository has versions 4 and 5 of the model, of which 5 is served. Prints what was answered, for a comparison with
gRPC: as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

LINES = ["Save the file.", "Close the window.", "Größe: 3 €"]
NAMES = ("text", "score", "token_ids")


def texts(binary: bool, *values: str) -> list[Any]:
    tensor = triton.InferInput("text", [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([each.encode() for each in values], dtype=np.object_), binary_data=binary)
    return [tensor]


def shown(result: Any) -> dict[str, Any]:
    found = {name: result.as_numpy(name) for name in NAMES}
    texts = [[each if isinstance(each, str) else each.decode() for each in row] for row in found["text"]]
    return {"text": texts, **{name: found[name].tolist() for name in NAMES[1:] if found[name] is not None}}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """What both have; scores as nearly as batches of other sizes compute them."""
    ids = (one.get("token_ids"), other.get("token_ids"))
    return (
        one["text"] == other["text"]
        and (None in ids or ids[0] == ids[1])
        and np.allclose(one["score"], other["score"], atol=1e-4)
    )


def refusal(action: Any) -> tuple[str, str]:
    try:
        action()
    except InferenceServerException as error:
        return str(error.status()), str(error.message())
    raise AssertionError("it was not refused")


def described(client: Any, model: str) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model)
    assert client.is_model_ready(model, "5")
    assert not client.is_model_ready(model, "4")
    assert not client.is_model_ready("unknown")
    assert client.get_server_metadata()["name"] == "beamline"
    metadata = client.get_model_metadata(model)
    assert (metadata["versions"], metadata["inputs"][1]["shape"]) == (["5"], [-1, -1])
    config = client.get_model_config(model)
    assert config["input"][0] == {"name": "text", "data_type": "TYPE_STRING", "dims": [-1], "optional": True}


def answered(client: Any, model: str) -> list[Any]:
    """The same in every way in which it can be asked, JSON and binary."""
    options = {"beam_size": 4, "num_hypotheses": 2}
    found = []
    for binary_in in (True, False):
        for binary_out in (True, False):
            outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in NAMES]
            result = client.infer(model, texts(binary_in, *LINES), outputs=outputs, request_id="42", parameters=options)
            assert result.get_response()["id"] == "42"
            assert result.get_response()["model_version"] == "5"
            found.append(shown(result))
    default = client.infer(model, texts(True, *LINES), parameters=options)  # as it comes: all outputs binary
    assert default.as_numpy("score").dtype == np.float32
    assert default.as_numpy("token_ids") is None
    found.append(shown(default))
    pending = [client.async_infer(model, texts(True, *LINES), parameters=options) for _ in range(4)]
    found += [shown(each.get_result()) for each in pending]
    assert all(same(each, found[0]) for each in found), found
    return found


def by_ids(client: Any, model: str, ids: list[int]) -> Any:
    found = []
    for datatype in ("INT64", "INT32"):
        for binary in (True, False):
            tensor = triton.InferInput("token_ids", [1, len(ids)], datatype)
            tensor.set_data_from_numpy(np.array([ids], dtype=datatype.lower()), binary_data=binary)
            found.append(shown(client.infer(model, [tensor])))
    assert all(same(each, found[0]) for each in found), found
    return found[0]


def refused(client: Any, model: str) -> None:
    ask = client.infer
    status, sentence = refusal(lambda: ask(model, texts(True, "a"), parameters={"beams": 2}))
    assert (status, sentence.startswith("parameter 'beams' is not known")) == ("400", True)
    assert refusal(lambda: ask("unknown", texts(True, "a")))[0] == "404"
    assert refusal(lambda: ask(model, texts(True, "a"), model_version="9"))[0] == "404"
    assert refusal(lambda: ask(model, texts(True, "a"), sequence_id=3))[0] == "400"
    squeezed = refusal(lambda: ask(model, texts(True, "a"), request_compression_algorithm="gzip"))
    assert (squeezed[0], "without compression" in squeezed[1]) == ("415", True)
    wrong = texts(True, "a")
    wrong[0].set_shape([3])
    assert refusal(lambda: ask(model, wrong)) == ("400", "input 'text' has 1 BYTES elements, but shape [3] needs 3")
    assert refusal(lambda: client.get_model_metadata("unknown"))[0] == "404"
    assert refusal(lambda: client.get_system_shared_memory_status())[0] == "404"


def managed(client: Any, model: str) -> None:
    both = json.dumps({"version_policy": {"specific": {"versions": [4, 5]}}})
    client.load_model(model, config=both)
    assert client.is_model_ready(model, "4")
    assert client.infer(model, texts(True, "a"), model_version="4").get_response()["model_version"] == "4"
    (one,) = client.get_inference_statistics(model, "4")["model_stats"]
    assert one["inference_stats"]["success"]["count"] == one["inference_count"] == 1
    assert len(client.get_inference_statistics()["model_stats"]) == 2
    client.unload_model(model)
    assert not client.is_model_ready(model)
    assert refusal(lambda: client.infer(model, texts(True, "a")))[0] == "503"
    assert {each["state"] for each in client.get_model_repository_index()} <= {"UNAVAILABLE", "UNLOADING"}
    client.load_model(model)
    assert client.is_model_ready(model, "5")
    assert refusal(lambda: client.load_model("unknown"))[0] == "404"
    files = {"file:1/model.onnx": b"x"}
    assert refusal(lambda: client.load_model(model, config="{}", files=files))[0] == "400"


async def with_aiohttp(address: str, model: str) -> Any:
    async with tritonclient.http.aio.InferenceServerClient(address) as client:
        assert await client.is_model_ready(model)
        await client.load_model(model)
        return shown(await client.infer(model, texts(True, *LINES)))


def main() -> None:
    address, model, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    client = triton.InferenceServerClient(address, concurrency=4, network_timeout=120.0)
    described(client, model)
    found = {"texts": answered(client, model)[0], "ids": by_ids(client, model, ids)}
    refused(client, model)
    managed(client, model)
    client.close()
    print(json.dumps({**found, "aio": asyncio.run(with_aiohttp(address, model))}))


if __name__ == "__main__":
    main()
