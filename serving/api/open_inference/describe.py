"""What the server says of its models: metadata, configuration, statistics, index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from google.protobuf import json_format

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.infer import SCORE, TEXT, TOKEN_IDS
from beamline.serving.api.open_inference.pooled import EMBEDDING, LABEL, PROBABILITY, outputs
from beamline.serving.contract.manifest import PooledManifest
from beamline.serving.engine.pooled import PooledEngine
from beamline.serving.errors import InvalidRequest
from beamline.serving.models.loader import ServedEngine, ServedModel
from beamline.serving.models.manager import Listed, State
from beamline.serving.models.settings import Versions
from beamline.serving.telemetry.statistics import Total

PLATFORM = "beamline"
EXTENSIONS = ("model_configuration", "model_repository", "statistics", "parameters")  # as Triton names them

# Name, datatype, shape; -1 is any size. A request has one of the inputs.
_Tensor = tuple[str, str, tuple[int, ...]]
_INPUTS: tuple[_Tensor, ...] = ((TEXT, "BYTES", (-1,)), (TOKEN_IDS, "INT64", (-1, -1)))
_WRITTEN: tuple[_Tensor, ...] = (
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
    """max_batch_size is 0: requests are put together by the server, whatever their shapes."""
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
        parameters={name: oip.ModelParameter(string_value=str(value)) for name, value in _facts(model.engine).items()},
        model_transaction_policy=oip.ModelTransactionPolicy(decoupled=False),
    )


def _outputs(model: ServedModel) -> Sequence[_Tensor]:
    manifest = model.manifest
    if not isinstance(manifest, PooledManifest):
        return _WRITTEN
    tensors: dict[str, _Tensor] = {
        LABEL: (LABEL, "BYTES", (-1, -1)),
        PROBABILITY: (PROBABILITY, "FP32", (-1, -1)),
        EMBEDDING: (EMBEDDING, "FP32", (-1, manifest.width)),
    }
    return [tensors[name] for name in outputs(manifest).known]


def _facts(engine: ServedEngine | PooledEngine) -> dict[str, object]:
    if isinstance(engine, PooledEngine):
        reads = engine.manifest
        return {
            "task": reads.task,
            "family": reads.family,
            "slots": engine.rows,
            "max_source_length": reads.max_source_length,
            "vocabulary": reads.vocabulary_size,
            "labels": json.dumps(reads.labels, ensure_ascii=False),
            "poolings": ",".join(reads.poolings),
            "normalize": json.dumps(reads.normalize),
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
    }


def statistics(model: ServedModel) -> oip.ModelStatistics:
    """A request is one text. `compute_input` is the host's work before the engine has it, `queue` the wait for a slot,
    `compute_infer` from there to the answer, and `compute_output` the host's work behind it; `success` is their sum.
    Executions are steps, and a batch is what was in one."""
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


def index(lines: Iterable[Listed], only_ready: bool) -> oip.RepositoryIndexResponse:
    return oip.RepositoryIndexResponse(
        models=[
            oip.RepositoryIndexResponse.ModelIndex(
                name=line.name, version=line.version, state=line.state.value, reason=line.reason
            )
            for line in lines
            if line.state is State.READY or not only_ready
        ]
    )


def asked_versions(request: oip.RepositoryModelLoadRequest) -> Versions | None:
    """Of Triton's load parameters we know `config`, and of a configuration its version policy. None: as the model's
    serving.toml says."""
    unknown = sorted(set(request.parameters) - {"config"})
    if unknown:
        raise InvalidRequest(
            f"parameter {unknown[0][:40]!r} is not known; a load knows `config`. Models come from the repository only"
        )
    if "config" not in request.parameters:
        return None
    try:
        content = json.loads(request.parameters["config"].string_param)
    except ValueError as error:
        raise InvalidRequest(f"parameter `config` is not JSON: {error}") from None
    if not isinstance(content, dict) or set(content) - {"name", "version_policy"}:
        raise InvalidRequest(
            "parameter `config` may hold only `version_policy`; all else stands in the model's serving.toml"
        )
    policy = oip.ModelVersionPolicy()
    try:
        json_format.ParseDict(content.get("version_policy", {}), policy)
    except json_format.ParseError as error:
        raise InvalidRequest(f"the version_policy can't be read: {error}") from None
    return _versions(policy)


def _versions(policy: oip.ModelVersionPolicy) -> Versions | None:
    kind = policy.WhichOneof("policy_choice")
    if kind == "all":
        return "all"
    if kind == "latest":
        if policy.latest.num_versions > 1:
            raise InvalidRequest("version_policy.latest can have one version; name several with `specific`")
        return "newest"
    if kind == "specific":
        versions = tuple(sorted(set(policy.specific.versions)))
        if not versions or versions[0] < 1:
            raise InvalidRequest("version_policy.specific needs versions, which are whole numbers from 1 on")
        return versions
    return None
