"""What a user of KServe's own client does, over v2 in HTTP: `python kserve_session.py ADDRESS MODEL`, where `kserve` is
installed. Prints the texts that came, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any

import httpx
import numpy as np
from kserve import InferInput, InferRequest
from kserve.inference_client import InferenceRESTClient, RESTConfig


def request(model: str, binary: bool, **parameters: Any) -> InferRequest:
    tensor = InferInput("text", [2], "BYTES")
    lines = np.array([b"Save the file.", b"Close the window."], dtype=np.object_)
    tensor.set_data_from_numpy(lines, binary_data=binary)
    return InferRequest(model, [tensor], parameters=parameters)


async def refusal(call: Awaitable[Any], status: int) -> str:
    try:
        await call
    except httpx.HTTPStatusError as error:
        found, sentence = error.response.status_code, str(error)
    else:
        raise AssertionError("it was not refused")
    assert found == status, sentence
    return sentence


async def session(base: str, model: str) -> list[Any]:
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=120))
    assert await client.is_server_live(base)
    assert await client.is_server_ready(base)
    assert await client.is_model_ready(base, model)
    found = []
    for binary_in in (False, True):
        for binary_out in (False, True):
            asked = request(model, binary_in, beam_size=4, binary_data_output=binary_out)
            answer = await client.infer(base, asked, model_name=model)
            assert answer.model_name == model
            texts = answer.get_output_by_name("text").as_numpy()
            assert texts.shape == (2, 1)
            assert answer.get_output_by_name("score").as_numpy().dtype == np.float32
            found.append([each if isinstance(each, str) else each.decode() for each in texts[:, 0]])
    wrong = request(model, False, beams=3)
    assert "parameter 'beams' is not known" in await refusal(client.infer(base, wrong, model_name=model), 400)
    elsewhere = client.infer(base, request(model, False), model_name="unknown")
    assert "there is no model 'unknown'" in await refusal(elsewhere, 404)
    assert not await client.is_model_ready(base, "unknown")
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(session(f"http://{sys.argv[1]}", sys.argv[2]))))
