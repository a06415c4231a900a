"""beamline: an inference server for sequence models, its clients, and its models in process.

    from beamline import Client, load

    print(Client().translate("Save the file.").text)
    print(load("model_repo/en-de").translate("Save the file.").text)

What goes into the methods and what comes back (`TokenIds`, `Translation`, ...) is here as well, errors are in
`beamline.errors`. `import beamline` is light: the clients, and gRPC with them, and what `load` needs are imported when
first used. The subpackages (`beamline.serving`, ...) are links to the directories at the top level of the repository,
so that everything is imported by one name.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# gRPC's own library writes lines of its own kind to standard error for every failed handshake and every port that is
# taken. What they are about is said in a sentence where it happens. It looks when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if TYPE_CHECKING:
    from beamline.async_client import AsyncClient
    from beamline.client import Client
    from beamline.errors import BeamlineError
    from beamline.in_process import AsyncLoadedModel, LoadedModel, load, load_async
    from beamline.types import (
        Classification,
        Completion,
        Embedding,
        Features,
        Generation,
        GenerationPiece,
        Hypothesis,
        Label,
        Message,
        Model,
        Score,
        SearchCandidate,
        SearchStep,
        SearchTrace,
        Timings,
        Token,
        TokenIds,
        TopToken,
        Translation,
        TranslationPiece,
        Usage,
    )

    __version__: str

__all__ = [
    "AsyncClient",
    "AsyncLoadedModel",
    "BeamlineError",
    "Classification",
    "Client",
    "Completion",
    "Embedding",
    "Features",
    "Generation",
    "GenerationPiece",
    "Hypothesis",
    "Label",
    "LoadedModel",
    "Message",
    "Model",
    "Score",
    "SearchCandidate",
    "SearchStep",
    "SearchTrace",
    "Timings",
    "Token",
    "TokenIds",
    "TopToken",
    "Translation",
    "TranslationPiece",
    "Usage",
    "__version__",
    "load",
    "load_async",
]

# Where each public name lives: the answers and inputs among them in `beamline.types`.
_HOMES = dict.fromkeys(__all__, "beamline.types") | {
    "AsyncClient": "beamline.async_client",
    "AsyncLoadedModel": "beamline.in_process",
    "BeamlineError": "beamline.errors",
    "Client": "beamline.client",
    "LoadedModel": "beamline.in_process",
    "load": "beamline.in_process",
    "load_async": "beamline.in_process",
}


def _find(name: str) -> Any:
    if name == "__version__":
        value = import_module("beamline.version").beamline_version()
    elif name in _HOMES:
        try:
            value = getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package == "beamline":
                raise
            raise ModuleNotFoundError(
                f"beamline.{name} needs {package}, which is not installed for {sys.executable}: call the Python of an "
                "environment that has beamline, or, in this project's folder, pip install -c constraints.txt .",
                name=error.name,
            ) from error
    else:
        raise AttributeError(f"module 'beamline' has no attribute {name!r}")
    globals()[name] = value  # the next time it is found without asking here
    return value


if not TYPE_CHECKING:  # else every name would be there for a type checker, also one that is misspelt
    __getattr__ = _find


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
