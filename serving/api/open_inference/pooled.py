"""Inference with a model that classifies or embeds.

In:  as for a model that writes text.
Out: where there are labels, `label` BYTES [N, K] and `probability` FP32 [N, K], the likeliest first; else, or where
     asked for, `embedding` FP32 [N, D].
"""

from __future__ import annotations

from collections.abc import Sequence

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.messages import Outputs, ParsedRequest
from beamline.serving.api.open_inference.parameters import PooledOptions
from beamline.serving.api.open_inference.tensors import OutputWriter
from beamline.serving.contract.manifest import PooledManifest
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.pooled import PooledModel, Read

LABEL, PROBABILITY, EMBEDDING = "label", "probability", "embedding"
_CLASSIFIES = Outputs((LABEL, PROBABILITY), (LABEL, PROBABILITY, EMBEDDING))
_EMBEDS = Outputs((EMBEDDING,), (EMBEDDING,))


def outputs(card: PooledManifest) -> Outputs:
    return _CLASSIFIES if card.labels else _EMBEDS


async def infer(
    model: PooledModel, request: ParsedRequest, size: int, deadline: float | None
) -> oip.ModelInferResponse:
    """`size` is the request's, in bytes."""
    options: PooledOptions = request.parameters.options
    classifies = request.wants(LABEL) or request.wants(PROBABILITY)
    if options.top_k is not None and not classifies:
        raise InvalidRequest(f"parameter 'top_k' chooses labels; ask for the output {LABEL!r}, or leave it out")
    count = model.label_count(options.top_k) if classifies else 0
    pooling = model.pooling(options.pooling)
    card = model.card

    def write(found: Sequence[Read]) -> oip.ModelInferResponse:
        best = [label for _, pooled in found for label in (model.labels(pooled, count) if classifies else ())]
        response = oip.ModelInferResponse(model_name=card.name, model_version=str(card.version), id=request.id)
        writer = OutputWriter(response, request.raw)
        for output in request.outputs:
            if output == LABEL:
                writer.text(output, [len(found), count], [label.name for label in best])
            elif output == PROBABILITY:
                writer.floats(output, [len(found), count], [label.probability for label in best])
            else:
                vectors = [model.vector(pooled, pooling, options.normalize) for _, pooled in found]
                values = [value for vector in vectors for value in vector.tolist()]
                writer.floats(output, [len(found), card.width], values)
        return response

    return await model.read(size, request.inputs, bool(options.truncate), deadline, write)
