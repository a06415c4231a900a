"""Small models of every kind and precision, for tests that run where there is no torch: python -m
tests.support.cuda_stub.models FOLDER [--full], in the environment that has it. FOLDER/kinds are three models in every
precision, FOLDER/families one of each family, or with --full all that `families.py` knows, in every precision."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from beamline.converters.passes.lowering import lower
from beamline.serving.contract.manifest import PRECISIONS, read_manifest
from tests.support.cuda_stub.families import KIN, kinds, left_out, write_kind
from tests.support.fixture_cache import fixture_cache
from tests.support.language_models import LLAMA, write_converted
from tests.support.marian_shape import EOS, export
from tests.support.pooled import write_pooled_repository
from tests.support.shipped import shipped

# Of the sample: the precision in which ONNX Runtime's CUDA provider has the fewest kernels.
SAMPLED = ("bfloat16",)
GRU = shipped("en-de-gru")


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


def write_families(folder: Path, full: bool) -> None:
    """folder/MODEL_TYPE/KIND/PRECISION is a version each."""
    if missing := left_out():
        raise SystemExit(f"of {', '.join(missing)} there is no model in tests/support/cuda_stub/families.py")
    precisions = tuple(each for each in PRECISIONS if each != "float32") if full else SAMPLED
    for model_type, all_kinds in kinds().items():
        wanted = list(all_kinds) if full else list(all_kinds)[: model_type not in KIN]
        for kind in wanted:
            into = folder / model_type / kind
            fixture_cache().fill(into, write_kind, model_type=model_type, kind=kind, precisions=precisions)


if __name__ == "__main__":
    from tests.support.cuda_stub import models  # under the name that the cache knows it by

    place = Path(sys.argv[1])
    shutil.rmtree(place, ignore_errors=True)
    fixture_cache().fill(place / "kinds", models.write_models, files=[GRU / "manifest.json"])
    write_families(place / "families", "--full" in sys.argv)
