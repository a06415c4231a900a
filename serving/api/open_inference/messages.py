"""ModelInferRequests parsed and checked, and ModelInferResponses written, for models that write text.

In:  `text` BYTES [N] or [N, 1], or `token_ids` INT32, INT64 or UINT32 [L] or [N, L], padded at the end with -1.
Out: `text` BYTES [N, H], `score` FP32 [N, H] and, where asked for, `token_ids` INT64 [N, H, L], padded with -1;
     H hypotheses, best first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.parameters import Options, Parameters, read_parameters
from beamline.serving.api.open_inference.tensors import InputTensor, OutputWriter, read_inputs
from beamline.serving.errors import InvalidRequest

TEXT, TOKEN_IDS, SCORE = "text", "token_ids", "score"
_NO_SCORE = -3.4028234663852886e38  # the lowest FP32: infinities can't be written as JSON by clients
_PADDING = -1
_MAX_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Outputs:
    """The names of the tensors that a model can return."""

    default: tuple[str, ...]
    known: tuple[str, ...]


TEXT_OUTPUTS = Outputs((TEXT, SCORE), (TEXT, SCORE, TOKEN_IDS))


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    inputs: list[pb.Input]
    parameters: Parameters
    outputs: tuple[str, ...]
    id: str
    raw: bool  # tensors travel in raw contents, in both directions

    def wants(self, output: str) -> bool:
        return output in self.outputs


@dataclass(frozen=True, slots=True)
class TextOutput:
    """One hypothesis, or a piece of one."""

    text: str
    score: float | None = None  # of a piece there is none
    token_ids: tuple[int, ...] = ()


CheckCount = Callable[[int], None]  # raises `InvalidRequest` for a number of inputs that the model does not take


def parse_request(
    request: oip.ModelInferRequest, options: Options, outputs: Outputs, check_count: CheckCount
) -> ParsedRequest:
    """`options` is an empty record of the kind that the model takes. Raises `InvalidRequest`."""
    return ParsedRequest(
        inputs=_inputs(read_inputs(request), check_count),
        parameters=read_parameters(request.parameters, options),
        outputs=_outputs(request, outputs),
        id=request.id,
        raw=bool(request.raw_input_contents),
    )


def _outputs(request: oip.ModelInferRequest, outputs: Outputs) -> tuple[str, ...]:
    known = ", ".join(outputs.known)
    if len(request.outputs) > len(outputs.known):
        raise InvalidRequest(f"{len(request.outputs)} outputs are asked for; there is {known}, each once")
    names = tuple(dict.fromkeys(output.name for output in request.outputs))
    for output in request.outputs:
        if output.name not in outputs.known:
            raise InvalidRequest(f"there is no output {output.name[:40]!r}; there is {known}")
        if output.parameters:
            given = ", ".join(sorted(output.parameters))[:100]
            raise InvalidRequest(f"output {output.name!r} has parameters ({given}); this server knows none for outputs")
    return names or outputs.default


def _inputs(tensors: Sequence[InputTensor], check_count: CheckCount) -> list[pb.Input]:
    """The count is checked before anything is made for each: a kilobyte for a row of one id adds up."""
    if len(tensors) != 1 or tensors[0].name not in (TEXT, TOKEN_IDS):
        found = ", ".join(tensor.name[:40] for tensor in tensors[:5]) or "none"
        raise InvalidRequest(f"the request must have one input, {TEXT!r} or {TOKEN_IDS!r}; it has {found}")
    tensor = tensors[0]
    return _texts(tensor, check_count) if tensor.name == TEXT else _token_ids(tensor, check_count)


def _texts(tensor: InputTensor, check_count: CheckCount) -> list[pb.Input]:
    if tensor.datatype != "BYTES":
        raise InvalidRequest(f"input {TEXT!r} has datatype {tensor.datatype}; it must be BYTES")
    if len(tensor.shape) not in (1, 2) or tensor.shape[1:] not in ((), (1,)):
        raise InvalidRequest(f"input {TEXT!r} has shape {list(tensor.shape)}; it must be [N] or [N, 1]")
    check_count(len(tensor.bytes_values))
    try:
        return [pb.Input(text=value.decode()) for value in tensor.bytes_values]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {TEXT!r} is not UTF-8: {error.reason} at byte {error.start}") from None


def _token_ids(tensor: InputTensor, check_count: CheckCount) -> list[pb.Input]:
    if tensor.datatype == "BYTES":
        raise InvalidRequest(f"input {TOKEN_IDS!r} has datatype BYTES; it must be INT32, INT64 or UINT32")
    if len(tensor.shape) not in (1, 2):
        raise InvalidRequest(f"input {TOKEN_IDS!r} has shape {list(tensor.shape)}; it must be [L] or [N, L]")
    length = tensor.shape[-1]
    rows = 1 if len(tensor.shape) == 1 else tensor.shape[0]
    if rows and not length:
        raise InvalidRequest(f"input {TOKEN_IDS!r} has no ids; there is nothing to read")
    check_count(rows)
    values = [tensor.int_values[row * length : (row + 1) * length] for row in range(rows)]
    return [pb.Input(token_ids=pb.TokenIds(ids=_without_padding(row, ids))) for row, ids in enumerate(values)]


def _without_padding(row: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    end = ids.index(_PADDING) if _PADDING in ids else len(ids)
    if any(value != _PADDING for value in ids[end:]):
        raise InvalidRequest(f"input {TOKEN_IDS!r}, row {row}: behind the padding (-1) stands another id")
    wrong = next((value for value in ids[:end] if not 0 <= value <= _MAX_ID), None)
    if wrong is not None:
        raise InvalidRequest(f"input {TOKEN_IDS!r}, row {row}, contains {wrong}; ids are 0 or more, and -1 is padding")
    return ids[:end]


def infer_response(
    request: ParsedRequest, model: str, version: str, rows: Sequence[Sequence[TextOutput]]
) -> oip.ModelInferResponse:
    """A row has the hypotheses for one input."""
    response = oip.ModelInferResponse(model_name=model, model_version=version, id=request.id)
    width = max(map(len, rows))
    shape = [len(rows), width]
    # A search may find fewer hypotheses than were asked for.
    texts = [each for row in rows for each in (*row, *[TextOutput("")] * (width - len(row)))]
    writer = OutputWriter(response, request.raw)
    for output in request.outputs:
        if output == TEXT:
            writer.text(output, shape, [each.text for each in texts])
        elif output == SCORE:
            scores = [each.score for each in texts]
            if any(score is not None for score in scores):
                writer.floats(output, shape, [_NO_SCORE if score is None else score for score in scores])
        else:
            length = max(len(each.token_ids) for each in texts)
            flat = [i for each in texts for i in (*each.token_ids, *[_PADDING] * (length - len(each.token_ids)))]
            writer.integers(output, [*shape, length], flat)
    return response
