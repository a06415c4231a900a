"""What a manifest must say for each task."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from beamline.serving.backends.fake import fake_manifest
from beamline.serving.contract.manifest import Graphs, Manifest

CONTENT = fake_manifest().model_dump()
NO_FILE = {"file": "none", "sha256": ""}


def changed(task: str, graphs: dict[str, object], **vocabulary: object) -> dict[str, object]:
    return CONTENT | {"task": task, "graphs": graphs, "vocabulary": CONTENT["vocabulary"] | vocabulary}


def test_a_model_that_generates_needs_neither_encoder_nor_start_token() -> None:
    manifest = Manifest.model_validate(
        changed("generate", {"step": NO_FILE, "score": NO_FILE, "prefill": NO_FILE}, decoder_start_id=None)
    )
    assert manifest.graphs.encoder is None
    assert manifest.graphs.prefill is not None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (changed("translate", {"step": NO_FILE, "score": NO_FILE}), "needs graphs.encoder"),
        (changed("translate", CONTENT["graphs"], decoder_start_id=None), "needs graphs.encoder and vocabulary"),
        (changed("generate", CONTENT["graphs"]), "has no graphs.encoder"),
    ],
)
def test_a_manifest_that_contradicts_its_task_is_refused(content: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Manifest.model_validate(content)


def test_a_manifest_written_before_there_were_language_models_is_read() -> None:
    old = CONTENT | {"graphs": dict.fromkeys(("encoder", "step", "score"), NO_FILE)}
    for name in ("chat_template", "bos_token", "eos_token"):
        del old[name]
    assert Manifest.model_validate(old).graphs == Graphs.model_validate(CONTENT["graphs"])
