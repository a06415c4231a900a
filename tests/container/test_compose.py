"""The files for Docker Compose, alone and together."""

from __future__ import annotations

from typing import Any

import yaml

from tests.support.processes import ROOT


def read(name: str) -> dict[str, Any]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return dict(yaml.safe_load(text)["services"]["beamline"])


def merged(below: Any, above: Any) -> Any:
    """As `docker compose -f BELOW -f ABOVE` does it, as far as these files need: mappings key by key, all else is
    replaced; `build` may be a mapping or the path of its context."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    result = below | above
    for key in below.keys() & above.keys():
        under = {"context": below[key]} if key == "build" and isinstance(below[key], str) else below[key]
        result[key] = merged(under, above[key])
    return result


def test_the_images_for_cpus_and_gpus_have_names_of_their_own() -> None:
    """Under one name, whoever had one of them before would start it in the place of the other."""
    for_cpus = read("docker-compose.yml")
    for_gpus = merged(for_cpus, read("docker-compose.gpu.yml"))
    assert (for_cpus["image"], for_cpus["build"]) == ("beamline", ".")
    assert (for_gpus["image"], for_gpus["build"]) == ("beamline:gpu", {"context": ".", "args": {"DEVICE": "gpu"}})
    head = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for line in ("docker build -t beamline .", "docker build -t beamline:gpu --build-arg DEVICE=gpu ."):
        assert line in head


def test_an_image_is_built_here_and_never_fetched() -> None:
    """Compose would ask the public registry for an image of this name first, which is nobody's or a stranger's."""
    both = merged(read("docker-compose.yml"), read("docker-compose.gpu.yml"))
    assert both["pull_policy"] == read("docker-compose.yml")["pull_policy"] == "build"
