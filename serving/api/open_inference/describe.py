"""Descriptions of a served model: metadata, configuration, statistics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.messages import SCORE, TEXT, TOKEN_IDS
from beamline.serving.api.open_inference.pooled import EMBEDDING, LABEL, PROBABILITY, outputs
from beamline.serving.contract.manifest import PooledManifest
from beamline.serving.engine.pooled import PooledEngine
from beamline.serving.models.loader import ServedEngine, ServedModel
from beamline.serving.telemetry.statistics import Total

PLATFORM = "beamline"
# As Triton names them; the first is HTTP's.
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics", "parameters")

# Name, datatype, shape; -1 is any size. A request has one of the inputs.
_Tensor = tuple[str, str, tuple[int, ...]]
_INPUTS: tuple[_Tensor, ...] = ((TEXT, "BYTES", (-1,)), (TOKEN_IDS, "INT64", (-1, -1)))
_TEXT_OUTPUTS: tuple[_Tensor, ...] = (
    (TEXT, "BYTES", (-1, -1)),
    (SCORE, "FP32", (-1, -1)),
    (TOKEN_IDS, "INT64", (-1, -1, -1)),  # only where asked for
)
_CONFIG_TYPES = {"BYTES": oip.TYPE_STRING, "INT64": oip.TYPE_INT64, "FP32": oip.TYPE_FP32}


def metadata(model: ServedModel, versions: Iterable[int]) -> oip.ModelMetadataResponse:
    tensor = oip.ModelMetadataResponse.TensorMetadata
    return oip.ModelMetadataResponse(
        name=model.manifest.name,
        versions=[str(version) for version in versions],
        platform=PLATFORM,
        inputs=[tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in _INPUTS],
        outputs=[tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in _outputs(model)],
    )


def config(model: ServedModel, versions: Iterable[int]) -> oip.ModelConfig:
    """max_batch_size is 0, as Triton writes it for a model without a batch axis: the server batches sequences of any
    shapes itself."""
    return oip.ModelConfig(
        name=model.manifest.name,
        platform=PLATFORM,
        backend=PLATFORM,
        version_policy=oip.ModelVersionPolicy(specific=oip.ModelVersionPolicy.Specific(versions=versions)),
        input=[
            oip.ModelInput(name=name, data_type=_CONFIG_TYPES[datatype], dims=shape, optional=True)
            for name, datatype, shape in _INPUTS
        ],
        output=[
            oip.ModelOutput(name=name, data_type=_CONFIG_TYPES[datatype], dims=shape)
            for name, datatype, shape in _outputs(model)
        ],
        parameters={
            name: oip.ModelParameter(string_value=str(value)) for name, value in _parameters(model.engine).items()
        },
        model_transaction_policy=oip.ModelTransactionPolicy(decoupled=False),
    )


def _outputs(model: ServedModel) -> Sequence[_Tensor]:
    manifest = model.manifest
    if not isinstance(manifest, PooledManifest):
        return _TEXT_OUTPUTS
    tensors: dict[str, _Tensor] = {
        LABEL: (LABEL, "BYTES", (-1, -1)),
        PROBABILITY: (PROBABILITY, "FP32", (-1, -1)),
        EMBEDDING: (EMBEDDING, "FP32", (-1, manifest.width)),
    }
    return [tensors[name] for name in outputs(manifest).known]


def _parameters(engine: ServedEngine | PooledEngine) -> dict[str, object]:
    if isinstance(engine, PooledEngine):
        pooled = engine.manifest
        return {
            "task": pooled.task,
            "family": pooled.family,
            "slots": engine.rows,
            "max_source_length": pooled.max_source_length,
            "vocabulary": pooled.vocabulary_size,
            "labels": json.dumps(pooled.labels, ensure_ascii=False),
            "poolings": ",".join(pooled.poolings),
            "normalize": json.dumps(pooled.normalize),
        }
    manifest = engine.manifest
    return {
        "task": manifest.task,
        "family": manifest.family,
        "slots": engine.plan.slots,
        "max_source_length": manifest.limits.max_source_length,
        "max_target_length": manifest.limits.max_target_length,
        "max_beam_size": manifest.limits.max_beam_size,
        "source_vocabulary": manifest.vocabulary.source_size,
        "target_vocabulary": manifest.vocabulary.target_size,
        "defaults": manifest.defaults.model_dump_json(exclude_defaults=True),
        "source_languages": ",".join(manifest.source_languages),
        "target_languages": ",".join(manifest.target_languages),
    }


def statistics(model: ServedModel) -> oip.ModelStatistics:
    """A request is one text. `compute_input` is the host's work before the engine, `queue` the wait for a slot,
    `compute_infer` the time from there to the result, and `compute_output` the host's work after it; `success` is their
    sum. An execution is a step; its batch is the sequences that took part in it."""
    totals = model.statistics.totals()
    host = totals.reading.seconds + totals.writing.seconds
    return oip.ModelStatistics(
        name=model.manifest.name,
        version=str(model.version),
        last_inference=round(totals.last_request * 1000),
        inference_count=totals.success.count,
        execution_count=sum(total.count for total in totals.batches.values()),
        inference_stats=oip.InferStatistics(
            success=_duration(totals.success.plus(host, count=0)),
            fail=_duration(totals.failure),
            queue=_duration(totals.queue),
            compute_input=_duration(totals.reading),
            compute_infer=_duration(totals.compute),
            compute_output=_duration(totals.writing),
        ),
        batch_stats=[
            oip.InferBatchStatistics(batch_size=size, compute_infer=_duration(total))
            for size, total in sorted(totals.batches.items())
        ],
    )


def _duration(total: Total) -> oip.StatisticDuration:
    return oip.StatisticDuration(count=total.count, ns=round(total.seconds * 1e9))
