"""Small models of every kind and precision, for tests that run where there is no torch: python -m
tests.support.cuda_stub.models FOLDER, in the environment that has it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from beamline.converters.passes.lowering import lower
from beamline.serving.contract.manifest import PRECISIONS, read_manifest
from tests.support.fixture_cache import ROOT, fixture_cache
from tests.support.language_models import LLAMA, write_converted
from tests.support.marian_shape import EOS, export
from tests.support.pooled import write_pooled_repository

GRU = ROOT / "model_repo" / "en-de-gru" / "3"


def write_models(folder: Path) -> None:
    """KIND/PRECISION is a version each, and pooled/mood/1 a classifier."""
    plain = {kind: folder / kind / "float32" for kind in ("transformer", "language", "recurrent")}
    plain["transformer"].mkdir(parents=True)
    export(plain["transformer"], eos_ids=(EOS,), renormalise=False)
    with tempfile.TemporaryDirectory() as work:
        write_converted(Path(work), LLAMA)
        shutil.copytree(Path(work) / "repository" / LLAMA.name / "1", plain["language"])
    shutil.copytree(GRU, plain["recurrent"])
    for kind, source in plain.items():
        manifest = read_manifest(source)
        for precision in PRECISIONS:
            if precision == "float32":
                continue
            target = folder / kind / precision
            shutil.copytree(source, target)
            lowered, _ = lower(target, manifest, precision)
            (target / "manifest.json").write_text(lowered.to_json())
    write_pooled_repository(folder / "pooled")


if __name__ == "__main__":
    from tests.support.cuda_stub import models  # under the name that the cache knows it by

    place = Path(sys.argv[1])
    shutil.rmtree(place, ignore_errors=True)
    fixture_cache().fill(place, models.write_models, files=[GRU / "manifest.json"])
