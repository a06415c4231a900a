"""What TensorRT measured in earlier builds on a GPU, so that the next one need not. tensorrt-rtx measures nothing.

It is of no use to another release or another GPU, and TensorRT reports such a cache as an error: none of that is about
the plan.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from beamline.converters.tensorrt.library import BuildLog, Library
from beamline.converters.version.atomic_write import write_whole

log = logging.getLogger(__name__)


def cache_path(engines: Path, library: Library, capability: str, gpu: str) -> Path | None:
    """One for each GPU, by its name, and for each release."""
    if library.ahead_of_time:
        return None
    parts = ("timings", f"sm{capability}", re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-"), library.version)
    return engines / f"{'-'.join(filter(None, parts))}.{library.name}"


def remove_others(engines: Path, library: Library) -> None:
    """Those of other releases, which nobody will read."""
    for path in engines.glob(f"timings-*.{library.name}"):
        if not path.name.endswith(f"-{library.version}.{library.name}"):
            path.unlink()


def attach(config: Any, path: Path, said: BuildLog) -> Any:
    """The cache that the build will use, to be kept until it has ended; None where TensorRT wants none. One that it
    refuses is removed, and measured anew."""
    with said.during("timing cache"):
        if path.is_file():
            cache = _attached(config, path.read_bytes())
            if cache is not None and not said.timings:
                return cache
            reason = "; ".join(said.timings) or "it is of another GPU or release"
            log.warning("%s can't be used, and is measured anew: %s", path, reason)
            path.unlink()
        return _attached(config, b"")


def _attached(config: Any, content: bytes) -> Any:
    cache = config.create_timing_cache(content)
    return cache if cache is not None and config.set_timing_cache(cache, False) else None


def keep(config: Any, path: Path) -> None:
    """With what the build has measured."""
    cache = config.get_timing_cache()
    content = cache.serialize() if cache is not None else None
    if content is not None:
        write_whole(path, bytes(content))
