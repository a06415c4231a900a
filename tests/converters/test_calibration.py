"""Fixed scales of activations: who gets one, from text that is read as a server would read it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from beamline.converters.calibration import _Seen
from beamline.converters.command import _typical
from beamline.converters.families.reference import ReferenceConverter
from beamline.serving.contract.manifest import FIXED_SCALES
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.errors import ConversionError
from beamline.serving.models.repository import verify
from tests.support.checkpoints import EOS
from tests.support.engines import decode, make_engine, results

Rows = NDArray[np.float64]


def seen(*rows: Rows) -> _Seen:
    found = _Seen()
    for each in rows:
        found.add(each.astype(np.float32))
    return found


def test_rows_of_one_size_make_little_more_noise_than_scales_of_their_own() -> None:
    random = np.random.default_rng(0)
    for factor in (1e-4, 1.0, 1e4):
        assert seen(factor * random.standard_normal((500, 64))).noise() < 10


def test_rows_that_differ_much_make_a_lot() -> None:
    rows = np.random.default_rng(0).standard_normal((500, 64))
    rows[7] *= 100
    assert seen(rows).noise() > 100


def test_all_that_was_seen_fits_with_room_to_spare() -> None:
    found = seen(np.array([[-2.0, 0.5]]), np.array([[3.0, 1.0]]))
    scale, zero = found.scale()
    assert (0 - zero) * scale < -2.0
    assert (255 - zero) * scale > 3.0


def test_what_is_never_negative_has_all_levels_above_zero() -> None:
    assert seen(np.abs(np.random.default_rng(0).standard_normal((50, 8)))).scale()[1] == 0


@pytest.mark.parametrize("nothing", [np.zeros((5, 8)), np.full((5, 8), np.nan)])
def test_zeros_and_nonsense_get_no_scale(nothing: Rows) -> None:
    assert not seen(nothing).noise() <= 10


def test_memory_is_bounded() -> None:
    found = seen(*[np.ones((100, 4))] * 100)
    assert sum(map(len, found.kept)) <= 2048


@pytest.mark.usefixtures("copied_graphs")
def test_a_converted_version_has_scales_for_its_graphs(reference_source: Path, tmp_path: Path) -> None:
    lines = ["", "hello there", "a much longer line of text " * 100, "what is this?"]
    manifest, certificate = ReferenceConverter(reference_source).convert(
        "model", tmp_path, precision="int8", typical=lines
    )
    folder = tmp_path / "model" / "1"
    verify(folder, manifest)
    assert not list(folder.glob(".*"))
    assert certificate.calibration is not None
    assert certificate.calibration.lines == 2  # neither empty, nor too long
    fixed = [json.loads(said(folder / name)[FIXED_SCALES]) for name in ("encoder.onnx", "step.onnx")]
    assert sum(map(len, fixed)) == certificate.calibration.fixed > 0
    assert all(scale > 0 and 0 <= zero <= 255 for scales in fixed for scale, zero in scales.values())
    assert FIXED_SCALES not in said(folder / "score.onnx")
    assert f"fixed scales, of {certificate.calibration.activations} activations" in certificate.table()
    engine = make_engine(folder, manifest, slots=2)
    (found,) = results(
        decode(engine, [((5, 6, 7, EOS), DecodingOptions(beam_size=3, num_hypotheses=1, max_length=10))])
    )
    assert found.hypotheses


def said(graph: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(graph, load_external_data=False).metadata_props}


@pytest.mark.usefixtures("copied_graphs")
def test_text_that_never_fits_is_refused(reference_source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="nothing to calibrate by: every line has more than"):
        ReferenceConverter(reference_source).convert("model", tmp_path, precision="int8", typical=["too long " * 500])
    assert not (tmp_path / "model").exists()


def test_float_weights_have_nothing_to_calibrate(reference_source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="nothing to calibrate in float32: that is for --precision int8"):
        ReferenceConverter(reference_source).convert("model", tmp_path, typical=["text"])


def test_a_file_without_text_is_refused(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.bin"
    empty.write_text("\n \n", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConversionError, match="has no text"):
        _typical(empty)
    with pytest.raises(ConversionError, match="is not UTF-8"):
        _typical(binary)
    with pytest.raises(ConversionError, match="can't be read: No such file or directory"):
        _typical(tmp_path / "missing.txt")
