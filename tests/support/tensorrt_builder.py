"""TensorRT's builder without a GPU: networks, parser and profiles are tensorrt-rtx's own; the build itself measures
nothing, says what a test wants it to say, and gives bytes."""

from __future__ import annotations

from typing import Any

import tensorrt_rtx as real

from beamline.converters.tensorrt.library import Library

PLAN = b"a plan"
Said = tuple[tuple[str, str], ...]  # severity and message


class ScriptedModule:
    """Takes the place of the module `tensorrt`, which nobody can import without a GPU."""

    __version__ = "11.4.0"

    def __init__(
        self, building: Said = (), parsing: Said = (), preparing: Said = (), plan: bytes | None = PLAN
    ) -> None:
        self.building, self.parsing, self.preparing, self.plan = building, parsing, preparing, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def Builder(self, logger: Any) -> _Builder:
        return _Builder(self, logger)

    def OnnxParser(self, network: Any, logger: Any) -> _Parser:
        return _Parser(self, network, logger)


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

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        assert network.num_layers
        say(self._logger, self._module.building)
        return self._module.plan


class _Parser:
    def __init__(self, module: ScriptedModule, network: Any, logger: Any) -> None:
        self._module, self._logger, self._parser = module, logger, real.OnnxParser(network, logger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def parse(self, model: bytes, path: str) -> bool:
        say(self._logger, self._module.parsing)
        return bool(self._parser.parse(model, path))
