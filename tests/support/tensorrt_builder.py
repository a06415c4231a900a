"""TensorRT's builder without a GPU: networks, parser and profiles are tensorrt-rtx's own; the build itself measures
nothing, says what a test wants it to say, and gives bytes. Timing caches are of the release that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import tensorrt_rtx as real
from onnx import TensorProto, helper

from beamline.converters.tensorrt.graph import Graph, load
from beamline.converters.tensorrt.library import Library
from beamline.converters.tensorrt.profiles import Extent

SIZES = {"B": Extent(1, 2, 4)}  # of the smallest graph
PLAN = b"a plan"
Said = tuple[tuple[str, str], ...]  # severity and message


# As TensorRT says it of a timing cache that it can't read; then it gives an empty one.
REFUSAL: Said = (
    ("ERROR", "Error Code 1: Serialization (magicTagRead == kMAGIC_TAG failed. Magic tag does not match)"),
    ("ERROR", "The timing cache will not be used!"),
    ("WARNING", "Failed to deserialize timing cache. Returning an empty timing cache."),
)


class ScriptedModule:
    """Takes the place of the module `tensorrt`, which nobody can import without a GPU."""

    def __init__(
        self,
        building: Said = (),
        parsing: Said = (),
        preparing: Said = (),
        plan: bytes | None = PLAN,
        version: str = "11.4.0",
        refuses: str = "",  # how timing caches of other releases are: empty, none, mismatch; every: all of them
    ) -> None:
        self.building, self.parsing, self.preparing, self.plan = building, parsing, preparing, plan
        self.refuses = refuses
        self.__version__ = version
        self.timings: list[bytes | None] = []  # that each build began with

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def Builder(self, logger: Any) -> _Builder:
        return _Builder(self, logger)

    def OnnxParser(self, network: Any, logger: Any) -> _Parser:
        return _Parser(self, network, logger)


def smallest_graph(folder: Path) -> Graph:
    floats = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 8]) for name in ("x", "y")]
    proto = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", floats[:1], floats[1:])
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    onnx.save(model, folder / "g.onnx")
    return load("g", folder / "g.onnx")


def scripted(**said: Any) -> Library:
    return Library("tensorrt", ScriptedModule(**said))


def say(logger: Any, said: Said) -> None:
    for severity, message in said:
        logger.log(getattr(real.ILogger, severity), message)


class _Builder:
    def __init__(self, module: ScriptedModule, logger: Any) -> None:
        self._module, self._logger, self._builder = module, logger, real.Builder(logger)
        say(logger, module.preparing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def create_builder_config(self) -> _Config:
        return _Config(self._module, self._logger, self._builder.create_builder_config())

    def build_serialized_network(self, network: Any, config: _Config) -> bytes | None:
        assert network.num_layers
        cache = config.get_timing_cache()
        self._module.timings.append(None if cache is None else cache.content)
        if cache is not None:
            cache.content = f"measured by {self._module.__version__}".encode()
        say(self._logger, self._module.building)
        return self._module.plan


class _Config:
    """Timing caches of its own: tensorrt-rtx has none that work."""

    def __init__(self, module: ScriptedModule, logger: Any, config: Any) -> None:
        self._module, self._logger, self._config = module, logger, config
        self._timings: _Timings | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._config, name, value)

    def create_timing_cache(self, serialized_timing_cache: bytes) -> _Timings | None:
        content, how = serialized_timing_cache, self._module.refuses
        if how == "every" or (how == "none" and self._other(content)):
            say(self._logger, REFUSAL)
            return None
        if how == "empty" and self._other(content):
            say(self._logger, REFUSAL)
            return _Timings(b"")
        return _Timings(content)

    def set_timing_cache(self, cache: _Timings, ignore_mismatch: bool) -> bool:
        if not isinstance(cache, _Timings):
            raise TypeError("set_timing_cache(): incompatible function arguments")
        if self._other(cache.content) and not ignore_mismatch:
            say(self._logger, REFUSAL[1:2])
            return False
        self._timings = cache
        return True

    def get_timing_cache(self) -> _Timings | None:
        return self._timings

    def _other(self, content: bytes) -> bool:
        return content not in (b"", f"measured by {self._module.__version__}".encode())


class _Timings:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content


class _Parser:
    def __init__(self, module: ScriptedModule, network: Any, logger: Any) -> None:
        self._module, self._logger, self._parser = module, logger, real.OnnxParser(network, logger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def parse(self, model: bytes, path: str) -> bool:
        say(self._logger, self._module.parsing)
        return bool(self._parser.parse(model, path))
