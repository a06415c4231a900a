from __future__ import annotations

import json
from typing import Any

import pytest

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.repository import requested_versions
from beamline.serving.errors import InvalidRequest


def load(config: str) -> oip.RepositoryModelLoadRequest:
    request = oip.RepositoryModelLoadRequest(model_name="a")
    request.parameters["config"].string_param = config
    return request


MISTAKES = {
    "{": "is not JSON",
    "[" * 100_000: "is nested too deeply",
    '{"version_policy": ' * 100_000: "is nested too deeply",
    '{"version_policy": null}': "the version_policy must be an object",
    '{"version_policy": [1]}': "the version_policy must be an object",
    '{"version_policy": {"latest": {"num_versions": 1e400}}}': "the version_policy can't be read",
    '{"version_policy": {"specific": {"versions": [1%s]}}}' % ("0" * 400): "the version_policy can't be read",
}


@pytest.mark.parametrize("config", MISTAKES, ids=[config[:60] for config in MISTAKES])
def test_a_configuration_that_is_wrong_is_refused_with_a_sentence(config: str) -> None:
    with pytest.raises(InvalidRequest, match=MISTAKES[config]):
        requested_versions(load(config))


def test_the_versions_that_a_load_may_ask_for() -> None:
    assert requested_versions(oip.RepositoryModelLoadRequest(model_name="a")) is None
    assert requested_versions(load("{}")) is None
    policies: list[dict[str, Any]] = [{"all": {}}, {"latest": {}}, {"specific": {"versions": [2, "1", 2]}}]
    asked = [requested_versions(load(json.dumps({"version_policy": policy}))) for policy in policies]
    assert asked == ["all", "newest", (1, 2)]
