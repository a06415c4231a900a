"""beamline: an inference server for sequence models, its clients, and its models in process.

    from beamline import Client, load

    print(Client().translate("Save the file.").text)
    print(load("model_repo/en-de").translate("Save the file.").text)

`import beamline` is light: the clients, and gRPC with them, and what `load` needs are imported when first used. The
subpackages (`beamline.serving`, ...) are links to the directories at the top level of the repository, so that
everything is imported by one name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beamline.async_client import AsyncClient
    from beamline.client import Client
    from beamline.errors import BeamlineError
    from beamline.in_process import AsyncLoadedModel, LoadedModel, load, load_async

    __version__: str

__all__ = [
    "AsyncClient",
    "AsyncLoadedModel",
    "BeamlineError",
    "Client",
    "LoadedModel",
    "__version__",
    "load",
    "load_async",
]

_HOMES = {
    "AsyncClient": "beamline.async_client",
    "AsyncLoadedModel": "beamline.in_process",
    "BeamlineError": "beamline.errors",
    "Client": "beamline.client",
    "LoadedModel": "beamline.in_process",
    "load": "beamline.in_process",
    "load_async": "beamline.in_process",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name == "__version__":
        value = import_module("beamline.version").beamline_version()
    else:
        raise AttributeError(f"module 'beamline' has no attribute {name!r}")
    globals()[name] = value  # the next time it is found without asking here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
