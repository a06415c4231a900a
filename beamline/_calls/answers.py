"""The parts that answers of several kinds have in common, as the public types have them."""

from __future__ import annotations

from beamline.protos import beamline_pb2 as pb
from beamline.types import FinishReason, Timings, Token, TopToken

FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_EOS: "eos",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TIME_LIMIT: "time_limit",
    pb.FINISH_REASON_STOP: "stop",
}


def token_of(message: pb.GeneratedToken) -> Token:
    return Token(
        message.id,
        message.piece,
        message.log_prob if message.HasField("log_prob") else None,
        tuple(TopToken(top.id, top.piece, top.log_prob) for top in message.top),
        message.from_prompt,
    )


def timings_of(message: pb.Timings) -> Timings:
    return Timings(message.queue_ms, message.encode_ms, message.decode_ms)
