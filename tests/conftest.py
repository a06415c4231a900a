"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Two threads that wait for each other actively are slower than one, wherever the machine is shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

from beamline.serving.models import loading
from tests.support.fixture_cache import ROOT, fixture_cache
from tests.support.work_units import arrange

if TYPE_CHECKING:
    from tests.support.language_models import ConvertedLanguageModel
    from tests.support.marian_shape import MarianShape
    from tests.support.tiny_lm import TinyModel

# A shell starts what runs in the background deaf to Ctrl-C, and so would be the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("beamline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("beamline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    arrange(items)


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: nobody need look through them for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def unloaded_models_go_by_themselves() -> Iterator[None]:
    """A server that unloads a model looks through its whole process for garbage: milliseconds in one of its own, where
    tests see it give memory back, and half a second here, beside torch, hundreds of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "give_memory_back", lambda: None)
        yield


# What the fixtures need is imported inside them: torch and transformers take seconds, and most tests don't need them.


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    """One end token; log-probabilities are left as the rules made them."""
    from tests.support.marian_shape import EOS, exported

    return exported(tmp_path_factory.mktemp("plain"), eos_ids=(EOS,), renormalise=False)


@pytest.fixture(scope="session")
def renormalising_model(tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    """Two end tokens, one word forbidden in the graph, log-probabilities renormalised: as published Marian models."""
    from tests.support.marian_shape import EOS, SECOND_EOS, exported

    return exported(tmp_path_factory.mktemp("renorm"), eos_ids=(EOS, SECOND_EOS), renormalise=True)


@pytest.fixture(scope="session")
def marian_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face Marian model with both tokenizers; see `tests/support/lively.py`."""
    from tests.support.lively import write_lively_marian

    return fixture_cache().fill(tmp_path_factory.mktemp("checkpoint") / "marian", write_lively_marian)


@pytest.fixture(scope="session")
def model_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as version 1 of `tiny`, converted by the real command in a process of its own. Not to be changed."""
    from tests.support.lively import convert_lively_marian

    return fixture_cache().fill(
        tmp_path_factory.mktemp("repository"),
        convert_lively_marian,
        runs=["beamline.serving.cli", "beamline.converters.command"],
        files=[ROOT / "pyproject.toml"],  # which says what is a command
    )


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A decoder-only model over bytes."""
    from tests.support.tiny_lm import exported_tiny_lm

    return exported_tiny_lm(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedLanguageModel:
    """A Llama with grouped queries and rescaled positions, converted. Not to be changed."""
    from tests.support.language_models import LLAMA, convert_language_model

    return convert_language_model(LLAMA, tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="session")
def pooled_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small classifier as version 1 of `mood`. Not to be changed."""
    from tests.support.pooled import write_pooled_repository

    return fixture_cache().fill(tmp_path_factory.mktemp("pooled"), write_pooled_repository)
