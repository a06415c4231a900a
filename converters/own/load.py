"""`path/to/file.py:build`: runs a user's Python, which is only ever done here, because the user asked for it."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from beamline.serving.errors import ConversionError


@dataclass(frozen=True)
class Origin:
    """Where a module's code is, so that an error can say where in it."""

    file: Path
    function: str

    @classmethod
    def parse(cls, text: str) -> Origin | None:
        """None where it is no such name: a folder, most often."""
        file, colon, function = text.rpartition(":")
        if not colon or not file.endswith(".py"):
            return None
        if not function.isidentifier():
            raise ConversionError(f"{text}: after the colon comes the name of a function that returns the module")
        return cls(Path(file), function)

    def place(self, error: BaseException) -> str:
        """The last line of the user's file that an error passed through, as " (file.py, line 7)"."""
        own = str(self.file.resolve())
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
        return f" ({self.file.name}, line {lines[-1]})" if lines else ""

    def place_of(self, method: object) -> str:
        """Where it begins, in the same form; nothing where it is not in the user's file."""
        code = getattr(getattr(method, "__func__", None), "__code__", None)
        if code is None or code.co_filename != str(self.file.resolve()):
            return ""
        return f" ({self.file.name}, line {code.co_firstlineno})"

    def describe(self, error: BaseException) -> str:
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'no message'}{self.place(error)}"


def _digest(file: Path) -> str:
    return hashlib.sha256(str(file).encode()).hexdigest()[:8]


def build(origin: Origin) -> nn.Module:
    """The module that the user's function returns. Its folder can be imported from, as when the file is run."""
    file = origin.file.resolve()
    if not file.is_file():
        raise ConversionError(f"{origin.file} does not exist")
    # By a name of its own: tracing looks a function's globals up in the module of that name, also when other files of
    # the same name were loaded in between.
    spec = importlib.util.spec_from_file_location(f"beamline_own_{file.stem}_{_digest(file)}", file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look their module up there
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(loaded)
        function: Callable[[], object] | None = getattr(loaded, origin.function, None)
        if not callable(function):
            raise ConversionError(f"{origin.file} has no function {origin.function!r}")
        module = function()
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(f"{origin.file}:{origin.function} failed: {origin.describe(error)}") from error
    finally:
        sys.path.remove(str(file.parent))
    if not isinstance(module, nn.Module):
        raise ConversionError(f"{origin.file}:{origin.function} returned {type(module).__name__}, not an nn.Module")
    return module
