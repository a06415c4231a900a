"""A model that nobody here wrote, served: what the package g2p-en predicts itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.g2p import Package, convert_g2p, english_words
from tests.support.processes import run_beamline, serving


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_served_model_says_what_the_package_predicts(tmp_path: Path) -> None:
    try:
        package = Package()
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"g2p-en can't be installed here: {error}")
    words = [*english_words(990), "é", "o'clock", "UPPER", "a" * 40, "x-ray", "zzz", "naïve", "qwrtp", "a b", "?"]
    with package:
        expected = package.predict(words).phonemes
        convert_g2p(package.weights, tmp_path / "repository")
    assert len({tuple(phonemes) for phonemes in expected}) > 900
    (tmp_path / "words.txt").write_text("\n".join(words) + "\n")
    with serving(tmp_path / "log", "--repo", str(tmp_path / "repository")) as server:
        answer = run_beamline("translate", "--target", server.grpc, "--no-split", "--file", str(tmp_path / "words.txt"))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == [" ".join(phonemes) for phonemes in expected]
