"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os

# Two threads that wait for each other actively are slower than one, wherever the machine is shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.support.marian_shape import EOS, SECOND_EOS, MarianShape, export, make_original


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    """One end token; log-probabilities are left as the rules made them."""
    return export(make_original(), tmp_path_factory.mktemp("plain"), eos_ids=(EOS,), renormalise=False)


@pytest.fixture(scope="session")
def renormalising_model(tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    """Two end tokens, one word forbidden in the graph, log-probabilities renormalised: as published Marian models."""
    return export(make_original(), tmp_path_factory.mktemp("renorm"), eos_ids=(EOS, SECOND_EOS), renormalise=True)
