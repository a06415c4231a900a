"""beamline: an inference server for sequence models, and its clients.

    from beamline import Client

    print(Client().translate("Save the file.").text)

`import beamline` is light: the clients, and gRPC with them, are imported when they are first used. The subpackages
(`beamline.serving`, ...) are links to the directories at the top level of the repository, so that everything is
imported by one name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beamline.async_client import AsyncClient
    from beamline.client import Client
    from beamline.errors import BeamlineError

    __version__: str

__all__ = ["AsyncClient", "BeamlineError", "Client", "__version__"]

_HOMES = {
    "AsyncClient": "beamline.async_client",
    "BeamlineError": "beamline.errors",
    "Client": "beamline.client",
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
