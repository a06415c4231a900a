"""A Ray Serve application: replicas that hold the engine, behind Ray's own proxies. See docs/ray.md.

app                   the application, for `import_path` in Ray's configuration: `beamline.ray:app`
services              all gRPC services, for its `grpc_servicer_functions`: `beamline.ray:services`
services_by_model     the same, for an application whose replicas load models as they are asked for

Nothing here is imported by `import beamline`; only `app` needs Ray.
"""

from __future__ import annotations

from typing import Any

from beamline.ray.proxy import services, services_by_model

__all__ = ["app", "services", "services_by_model"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from beamline.ray.application import app

    return app
