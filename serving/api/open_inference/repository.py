"""The model repository extension: the index, and what a load may ask for."""

from __future__ import annotations

import json
from collections.abc import Iterable

from google.protobuf import json_format

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.errors import InvalidRequest
from beamline.serving.models.manager import Listed, State
from beamline.serving.models.settings import Versions


def index(models: Iterable[Listed], only_ready: bool) -> oip.RepositoryIndexResponse:
    return oip.RepositoryIndexResponse(
        models=[
            oip.RepositoryIndexResponse.ModelIndex(
                name=model.name, version=model.version, state=model.state.value, reason=model.reason
            )
            for model in models
            if model.state is State.READY or not only_ready
        ]
    )


def requested_versions(request: oip.RepositoryModelLoadRequest) -> Versions | None:
    """The versions that the model shall have; None where serving.toml decides. Of Triton's load parameters `config` is
    known, and of a configuration its version policy."""
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
    except RecursionError:
        raise InvalidRequest("parameter `config` is nested too deeply") from None
    if not isinstance(content, dict) or set(content) - {"name", "version_policy"}:
        raise InvalidRequest(
            "parameter `config` may hold only `version_policy`; all else stands in the model's serving.toml"
        )
    policy, asked = oip.ModelVersionPolicy(), content.get("version_policy", {})
    if not isinstance(asked, dict):
        raise InvalidRequest("the version_policy must be an object")
    try:
        json_format.ParseDict(asked, policy)
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
