"""Few bits against float32: what is compared, and that it can fail."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from beamline.converters.certificate import precision
from beamline.converters.certificate.graph_runner import Case, GraphRunner
from beamline.converters.passes import lowering
from beamline.serving.errors import ParityFailure
from tests.support.marian_shape import MarianShape


def cases(model: MarianShape) -> list[Case]:
    random = np.random.default_rng(3)
    start = (model.manifest.vocabulary.start_id,)
    return [Case(tuple(random.integers(2, 58, length).tolist()), start) for length in (3, 9, 4, 12, 20) * 2]


def coarse(model: ir.Model, state: object) -> None:
    """As if a scale were far too large: of each matrix, only the signs of its largest numbers are left."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype is ir.DataType.FLOAT and tensor.size >= 1024:
            numbers = tensor.numpy()
            step = np.abs(numbers).max()
            value.const_value = ir.Tensor((np.rint(numbers / step) * step).astype(np.float32), name=value.name)


def test_text_that_both_read_alike(plain_model: MarianShape, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain_model.folder, tmp_path / "version"))
    _, check = lowering.lower(folder, plain_model.manifest, "int8", cases(plain_model))
    assert check.text is not None
    assert (check.text.lines, check.problems()) == (10, [])
    assert check.text.words >= 5
    assert 0.8 <= check.text.share <= 1
    assert 20 <= check.text.sure_words < check.text.words
    assert check.text.sure_share == 1
    titles = [title for title, _, _ in check.rows()]
    assert [title.partition(", of ")[0] for title in titles[-2:]] == ["int8, same best words", "int8, the same"]


def test_best_words_along_ones_own_text_are_ones_own(plain_model: MarianShape) -> None:
    runner = GraphRunner(plain_model.folder, plain_model.manifest)
    given = cases(plain_model)
    written, best, ahead = runner.best_words(given, [()] * len(given), 10)
    again, forced, _ = runner.best_words(given, written, 10)
    assert (again, forced) == (written, best)
    assert all(margin >= 0 for margins in ahead for margin in margins)
    greedy = [beams.sequences[0][1:] for beams in runner.beams(given, 1, 10)]
    assert written == greedy


def test_other_words_on_real_text_are_refused(
    plain_model: MarianShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nothing else would refuse it; what stood there before is not touched."""
    folder = Path(shutil.copytree(plain_model.folder, tmp_path / "version"))
    before = (folder / "step.onnx").read_bytes()
    broken = replace(lowering.LOWERINGS["int8"], graph=coarse)
    monkeypatch.setattr(lowering, "LOWERINGS", {"int8": broken})
    monkeypatch.setitem(precision._LIMITS, "int8", (None, np.inf))
    sentence = r"on real text, only \d+% of the best words are the same as in float32; at least 80% must be"
    with pytest.raises(ParityFailure, match=sentence):
        lowering.lower(folder, plain_model.manifest, "int8", cases(plain_model))
    assert (folder / "step.onnx").read_bytes() == before


def test_words_that_are_far_ahead_must_stay(plain_model: MarianShape, tmp_path: Path) -> None:
    """Of near ties few bits may lose many; where float32 is sure, next to none."""
    folder = Path(shutil.copytree(plain_model.folder, tmp_path / "version"))
    _, check = lowering.lower(folder, plain_model.manifest, "int4", cases(plain_model))
    assert check.text is not None
    assert check.text.sure_share >= check.text.sure_required == 0.85
    worse = replace(check.text, sure_share=0.84)
    assert check.text.problems() == []
    assert worse.problems() == [
        "on real text, only 84% of the best words that are far ahead are the same as in float32; at least 85% must be"
    ]
    assert replace(worse, sure_required=0.0).problems() == []
