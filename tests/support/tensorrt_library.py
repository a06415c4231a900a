"""TensorRT's runtime without a GPU: as much of the library as we call, over the emulator.

The classes are ours, but every call must fit a signature of the installed bindings' method of the same name. As the
library does, it keeps a pointer to the first logger that a process has given it, and ignores later ones.
"""

from __future__ import annotations

import re
import weakref
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import tensorrt_rtx as real

from beamline.serving.contract.tensorrt_plans import ENGINES, read_cards
from tests.support.emulated_device import EmulatedDevice, Refused
from tests.support.emulator import MODULE, VERSION, EmulatedContext, EmulatedRuntime


def fits(owner: type, method: str, count: int) -> bool:
    """Whether a method of the bindings takes so many arguments; they say it in their documentation."""
    text = getattr(owner, method).__doc__
    for parameters in re.findall(rf"\b{method}\((self: .*)\) -> ", text):
        # Types have commas inside brackets only, and no parameter of ours has such a type.
        names = parameters.split(", ")[1:]
        if sum("=" not in name for name in names) <= count <= len(names):
            return True
    return False


class Checked:
    """Calls of public methods are compared with the bindings' class."""

    real: type

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        owner = object.__getattribute__(self, "real")
        if name.startswith("_") or name == "real" or not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            if not fits(owner, name, len(arguments)):
                raise Refused(f"{owner.__name__}.{name} does not take {len(arguments)} arguments")
            return found(*arguments)

        return call


class EmulatedLibrary:
    """Takes the module's place. `made_with` is what each context was made with: contexts themselves die with their
    last owner, as the library's do."""

    __version__ = VERSION
    ILogger = real.ILogger
    ExecutionContextAllocationStrategy = Enum("ExecutionContextAllocationStrategy", "STATIC USER_MANAGED")
    CudaGraphStrategy = Enum("CudaGraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE")

    _loggers: ClassVar[dict[str, weakref.ref[Any]]] = {}  # of this process, by the library's name

    def __init__(self, device: EmulatedDevice, folder: Path, stream: int, name: str = MODULE) -> None:
        self.device, self.folder, self.stream, self.name = device, folder, stream, name
        self.made_with: list[Any] = []
        self.trouble: str | None = None  # what it says while it makes and runs nothing; messages between semicolons

    def Runtime(self, logger: Any) -> _Runtime:
        assert isinstance(logger, real.ILogger)
        self._loggers.setdefault(self.name, weakref.ref(logger))
        return _Runtime(self)

    def say_trouble(self) -> None:
        for message in (self.trouble or "").split("; "):
            self.say(message)

    def say(self, message: str, severity: Any = real.ILogger.ERROR) -> None:
        logger = self._loggers[self.name]()
        if logger is None:
            raise Refused("the library's logger is gone, and it has a pointer to it")
        logger.log(severity, message)


class _Runtime(Checked):
    real = real.Runtime

    def __init__(self, library: EmulatedLibrary) -> None:
        self._library = library
        self._runtime = EmulatedRuntime(library.device, library.folder)

    def deserialize_cuda_engine(self, content: bytes) -> _Engine | None:
        """Emulated plans hold their own name."""
        for card in read_cards(self._library.folder):
            path = self._library.folder / ENGINES / card.plan.file
            if path.read_bytes() == content:
                return _Engine(self._library, self._runtime.load(path, card), card.aliases)
        return None


class _Engine(Checked):
    real = real.ICudaEngine

    def __init__(self, library: EmulatedLibrary, engine: Any, aliases: dict[str, str]) -> None:
        self._library, self._engine, self._aliases = library, engine, aliases
        self.device_memory_size_v2 = engine.activation_bytes

    def get_aliased_input_tensor(self, name: str) -> str:
        return self._aliases[name]

    def create_runtime_config(self) -> _Config:
        return _Config()

    def create_execution_context(self, how: Any) -> _Context | None:
        if self._library.trouble is not None:
            self._library.say_trouble()
            return None
        self._library.made_with.append(how)
        return _Context(self._library, self._engine, how)


class _Config(Checked):
    real = real.IRuntimeConfig

    def __init__(self) -> None:
        self.cuda_graph_strategy: Any = None
        self._strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy


class _Context(Checked):
    real = real.IExecutionContext

    def __init__(self, library: EmulatedLibrary, engine: Any, how: Any) -> None:
        self._library, self._engine = library, engine
        strategy = how._strategy if isinstance(how, _Config) else how
        if strategy is not library.ExecutionContextAllocationStrategy.USER_MANAGED:
            raise Refused("the context would allocate memory of its own")
        self._context: EmulatedContext | None = None

    def set_device_memory(self, memory: int, size: int) -> None:
        if size < self._engine.activation_bytes:
            raise Refused(f"{size} bytes are too few for the activations")
        self._context = self._engine.context(memory)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._context is not None
        return self._said(self._context.set_shape(name, shape), f"{name} can't have the shape {shape}")

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert self._context is not None
        return self._said(self._context.set_address(name, memory), f"{name} can't lie at {memory}")

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self._context is None or stream_handle != self._library.stream:
            raise Refused("no memory for activations, or another stream")
        if self._library.trouble is not None:
            self._library.say_trouble()
            return False
        return self._said(self._context.enqueue(), "it can't be run")

    def _said(self, done: bool, otherwise: str) -> bool:
        if not done:
            self._library.say(otherwise)
        return done
