"""Requests that are answered, for a fuzzer to begin with: what is wrong in one place only comes further than noise."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from google.protobuf.message import Message

from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2 as oip

TEXT = pb.Input(text="A text. And more.")
IDS = pb.Input(token_ids=pb.TokenIds(ids=[5, 6, 7]))


def infer(
    model: str, outputs: Sequence[str] = (), ids: bool = False, raw: bool = True, **parameters: bool | int | str
) -> oip.ModelInferRequest:
    """Two texts, or two rows of ids, as tritonclient sends them (raw) or as grpcurl does."""
    request = oip.ModelInferRequest(model_name=model, id="mine")
    tensor = request.inputs.add(
        name="token_ids" if ids else "text", datatype="INT64" if ids else "BYTES", shape=[2, 3] if ids else [2]
    )
    rows, texts = (5, 6, 7, 8, 9, -1), (b"A text.", "Größe".encode())
    if raw:
        encoded = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        request.raw_input_contents.append(struct.pack("<6q", *rows) if ids else encoded)
    elif ids:
        tensor.contents.int64_contents.extend(rows)
    else:
        tensor.contents.bytes_contents.extend(texts)
    for output in outputs:
        request.outputs.add(name=output)
    for name, value in parameters.items():
        parameter = request.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        else:
            parameter.string_param = value
    return request


# To `beamline serve --fake`.
ECHO: tuple[Message, ...] = (
    pb.TranslateRequest(inputs=[TEXT, IDS], options=pb.DecodingOptions(beam_size=2, num_hypotheses=2)),
    pb.TranslateRequest(model="fake", inputs=[TEXT], options=pb.DecodingOptions(split_sentences=True)),
    pb.GenerateRequest(model="fake-lm", text="Once", options=pb.GenerationOptions(max_tokens=4, temperature=1, n=2)),
    pb.ScoreRequest(model="fake-lm", texts=[TEXT]),
    infer("fake", ["text", "score", "token_ids"], beam_size=2, priority=1),
    infer("fake", ids=True, raw=False, timeout=10**9),
    infer("fake-lm", max_tokens=3, stop="x"),
)

# To a server of the classifier `mood` (the fixture `pooled_repository`).
POOLED: tuple[Message, ...] = (
    pb.ClassifyRequest(model="mood", version="1", inputs=[TEXT, IDS], top_k=1, truncate=True),
    pb.ClassifyRequest(inputs=[TEXT]),
    pb.EmbedRequest(inputs=[TEXT, IDS], pooling=pb.POOLING_MEAN, normalize=True),
    infer("mood", ["label", "probability", "embedding"], top_k=2, pooling="mean", normalize=True, truncate=True),
    infer("mood", ["embedding"], ids=True, priority=2),
    infer("mood", raw=False, top_k=1),
    infer("", ids=True, raw=False, pooling="max", timeout=10**9),
)
