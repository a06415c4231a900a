"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Two threads that wait for each other actively are slower than one, wherever the machine is shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

from beamline.converters.families.reference_recurrent_pooled import ReferenceRecurrentPooledConverter
from tests.support.language_models import LLAMA, ConvertedLanguageModel, convert_language_model
from tests.support.lively import write_lively_marian
from tests.support.marian_shape import EOS, SECOND_EOS, MarianShape, export, make_original
from tests.support.pooled import pooled_config, pooled_model, write_pooled
from tests.support.processes import run_beamline
from tests.support.tiny_lm import TinyModel, export_tiny_lm

# A shell starts what runs in the background deaf to Ctrl-C, and so would be the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("beamline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("beamline")


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    """One end token; log-probabilities are left as the rules made them."""
    return export(make_original(), tmp_path_factory.mktemp("plain"), eos_ids=(EOS,), renormalise=False)


@pytest.fixture(scope="session")
def renormalising_model(tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    """Two end tokens, one word forbidden in the graph, log-probabilities renormalised: as published Marian models."""
    return export(make_original(), tmp_path_factory.mktemp("renorm"), eos_ids=(EOS, SECOND_EOS), renormalise=True)


@pytest.fixture(scope="session")
def marian_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face Marian model with both tokenizers; see `tests/support/lively.py`."""
    return write_lively_marian(tmp_path_factory.mktemp("checkpoint") / "marian")


@pytest.fixture(scope="session")
def model_repository(marian_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as version 1 of `tiny`, converted by the real command in a process of its own. Not to be changed."""
    repository = tmp_path_factory.mktemp("repository")
    converted = run_beamline("convert", str(marian_directory), "--name", "tiny", "--repo", str(repository))
    assert converted.returncode == 0, converted.stderr
    return repository


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A decoder-only model over bytes."""
    folder = tmp_path_factory.mktemp("language") / "tiny-lm" / "1"
    folder.mkdir(parents=True)
    return export_tiny_lm(folder)


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedLanguageModel:
    """A Llama with grouped queries and rescaled positions, converted. Not to be changed."""
    return convert_language_model(LLAMA, tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="session")
def pooled_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small classifier as version 1 of `mood`. Not to be changed."""
    folder = tmp_path_factory.mktemp("pooled")
    source = write_pooled(folder / "source", pooled_model(pooled_config()))
    ReferenceRecurrentPooledConverter(source).convert("mood", folder / "repository")
    return folder / "repository"
