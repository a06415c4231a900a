"""`python -m tests.request_path`: which of our modules a request passes, and which of our types carry it.

One Translate (the shipped en-de) and one Generate (a small Llama, which is converted first) go through a real server in
this process, called by a real gRPC client. A profiler looks at every Python thread (event loop, engine, text workers)
from the call to its answer. Another call goes before, for what is loaded or cached only once.

Modules are listed in the order of their first entry, with the function that was entered and its thread. A type is
listed where an instance was made during the call, or, of protobuf messages, where our code was given one or returned
it. It carries the request (marked *) where such an instance, when the call is over, holds text or token ids of the
request or its answer, or another object of the call that does. A module handles the request (marked * as well) where
one of its functions was given such an object, or text or ids themselves, or returned them. The others do something
beside it: they authenticate, measure, choose a shape, or define what these are.

It runs on any tree of this project, also one whose packages have other names: as a file, with that tree on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib
import json
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path.pop(0)  # run as a file, Python puts tests/ first, where tests/serving hides serving

import grpc.aio
import numpy as np
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

WARM_UP, TEXT = "Close the window.", "Save the file before you close the editor."
_DEPTH = 4  # containers within containers that are searched for the request's data
_QUIET_SECONDS = 0.5
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")


def package_of(name: str) -> str:
    """`serving` or `beamline.serving`, whichever the first tree on the path has: another may be installed."""
    for folder in map(Path, sys.path):
        if (folder / "beamline" / name).is_dir():
            return f"beamline.{name}"
        if (folder / name).is_dir():
            return name
    return f"beamline.{name}"


def load(name: str) -> ModuleType:
    package, _, module = name.partition(".")
    return importlib.import_module(f"{package_of(package)}.{module}")


class Project:
    """What is ours: files below the project's root, but for tests and environments."""

    def __init__(self) -> None:
        server = load("serving.server")
        assert server.__file__ is not None
        self.root = Path(server.__file__).parents[server.__name__.count(".")]
        self._known: dict[str, bool] = {}

    def has_module(self, name: str) -> bool:
        if name not in self._known:
            file = getattr(sys.modules.get(name), "__file__", None)
            self._known[name] = file is not None and self._has_file(Path(file))
        return self._known[name]

    def _has_file(self, file: Path) -> bool:
        if not file.is_relative_to(self.root):
            return False
        parts = file.relative_to(self.root).parts
        return parts[0] != "tests" and "site-packages" not in parts and not any(part.startswith(".") for part in parts)

    def has_type(self, kind: type) -> bool:
        return self.has_module(kind.__module__)


@dataclass(frozen=True)
class RequestData:
    """The text and the token ids of a request and its answer, to be found again in our objects."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]

    def is_in(self, value: Any, name: str = "") -> bool:
        if isinstance(value, str):
            # A piece of a stream may be short: only where the field's name says what it is.
            whole = any(text in value for text in self.texts)
            return whole or ("text" in name and bool(value.strip()) and any(value in text for text in self.texts))
        if isinstance(value, bytes):
            return any(text.encode() in value for text in self.texts)
        if isinstance(value, np.ndarray):
            return value.dtype.kind in "iu" and self._has_ids(value.ravel().tolist(), name)
        if isinstance(value, list | tuple) and value and all(isinstance(each, int | np.integer) for each in value):
            return self._has_ids([int(each) for each in value], name)
        return False

    def _has_ids(self, found: Sequence[int], name: str) -> bool:
        """Whole sequences; and parts of them where the field's name says that these are tokens."""
        part = "token" in name and len(found) > 0
        return any(_within(ids, found) or (part and _within(found, ids)) for ids in self.ids if ids)


def _within(part: Sequence[int], whole: Sequence[int]) -> bool:
    size = len(part)
    return any(list(whole[start : start + size]) == list(part) for start in range(len(whole) - size + 1))


@dataclass
class RequestPath:
    """What one call has passed."""

    modules: dict[str, str] = field(default_factory=dict)  # -> the first function, and its thread
    passed: dict[str, dict[int, tuple[str, Any]]] = field(default_factory=dict)  # what a module was given and returned
    handling: set[str] = field(default_factory=set)  # the modules that were given the request or its answer
    types: dict[type, bool] = field(default_factory=dict)  # -> whether it carries the request
    made: list[Any] = field(default_factory=list)
    calls: int = 1  # of our functions


class Profiler:
    """A profile function for every thread, which must be installed before the threads start. It looks only while a path
    is recorded."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._path: RequestPath | None = None
        self._busy = threading.local()  # looking at an object may call its methods

    def install(self) -> None:
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def record(self, path: RequestPath | None) -> None:
        self._path = path

    async def quiet(self) -> None:
        """Returns when none of our code has run for a moment: a call's last bookkeeping comes after its answer."""
        path = RequestPath()
        self.record(path)
        while path.calls:
            path.calls = 0
            await asyncio.sleep(_QUIET_SECONDS)
        self.record(None)

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        path = self._path
        if path is None or event not in ("call", "return") or getattr(self._busy, "now", False):
            return
        self._busy.now = True
        try:
            self._look(path, frame, event, arg)
        finally:
            self._busy.now = False

    def _look(self, path: RequestPath, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        ours = self._project.has_module(module)
        if event == "call":
            if ours and module not in path.modules and code.co_name != "<module>":
                path.modules[module] = f"{_function(frame)} [{threading.current_thread().name}]"
            if ours:
                path.calls += 1
                for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                    self._message(path, frame.f_locals.get(name))
                    _keep(path, module, name, frame.f_locals.get(name))
            return
        if ours:
            self._message(path, arg)
            _keep(path, module, code.co_name, arg)
        if code.co_name in _CONSTRUCTORS and code.co_argcount:
            made = arg if code.co_name == "__new__" else frame.f_locals.get(code.co_varnames[0])
            if made is not None and not isinstance(made, type) and self._project.has_type(type(made)):
                path.types.setdefault(type(made), False)
                path.made.append(made)

    def _message(self, path: RequestPath, value: Any) -> None:
        kind = type(value)
        if hasattr(kind, "DESCRIPTOR") and self._project.has_type(kind):
            path.types.setdefault(kind, False)
            path.made.append(value)


def _keep(path: RequestPath, module: str, name: str, value: Any) -> None:
    """For `mark_carriers`. A container as it is now: what it holds may have left it when the call is over."""
    if value is None or isinstance(value, int | float | type | FunctionType):
        return
    snapshot = list(value) if type(value) in (list, tuple, set) else value
    path.passed.setdefault(module, {})[id(value)] = (name, (snapshot, value))


def _function(frame: FrameType) -> str:
    """Its qualified name. That of a method which `dataclass` has made says nothing of its class."""
    code = frame.f_code
    if code.co_filename == "<string>" and code.co_argcount:
        return f"{type(frame.f_locals[code.co_varnames[0]]).__qualname__}.{code.co_name}"
    return code.co_qualname


def mark_carriers(path: RequestPath, data: RequestData) -> None:
    """Those that hold the data themselves, then those that hold one of them, until there are no more."""
    known: dict[int, bool] = {}

    def holds(value: Any, name: str = "", depth: int = 0) -> bool:
        if known.get(id(value)) or data.is_in(value, name):
            return True
        if depth == _DEPTH:
            return False
        if isinstance(value, dict):
            return any(holds(each, name, depth + 1) for each in list(value.values()))
        if isinstance(value, list | tuple | set | frozenset):
            return any(holds(each, name, depth + 1) for each in list(value))
        return False

    found = True
    while found:
        found = False
        for made in path.made:
            if known.get(id(made)):
                continue
            if any(holds(value, name) for name, value in _fields(made)):
                known[id(made)] = found = True
                path.types[type(made)] = True
    for module, values in path.passed.items():
        if any(holds(snapshot, name) for name, (snapshot, _) in values.values()):
            path.handling.add(module)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(type(value), "DESCRIPTOR"):
        yield "message", value.SerializeToString()
        yield from ((descriptor.name, content) for descriptor, content in value.ListFields())
        return
    if isinstance(value, tuple):  # a named one
        yield from zip(getattr(value, "_fields", ()), value, strict=False)
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)


# -- the calls -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    text: str
    ids: tuple[int, ...] = ()  # where asked for


@dataclass(frozen=True)
class Call:
    """One RPC of a model. `ids` tokenizes as the model does, without any code of ours."""

    name: str
    repository: Path | None  # None: the fake models
    model: str
    ask: Callable[[Any, Any, str, str, bool], Awaitable[Answer]]  # stub, messages, model, text, with ids
    ids: Callable[[str], tuple[int, ...]]


async def translate(stub: Any, pb: Any, model: str, text: str, with_ids: bool) -> Answer:
    options = pb.DecodingOptions(return_tokens=True) if with_ids else None
    response = await stub.Translate(pb.TranslateRequest(model=model, inputs=[pb.Input(text=text)], options=options))
    best = response.translations[0].hypotheses[0]
    return Answer(best.text, tuple(token.id for token in best.tokens))


async def generate(stub: Any, pb: Any, model: str, text: str, with_ids: bool) -> Answer:
    options = pb.GenerationOptions(max_tokens=8, return_tokens=with_ids)
    replies = [reply async for reply in stub.Generate(pb.GenerateRequest(model=model, text=text, options=options))]
    ids = tuple(token.id for reply in replies for token in reply.tokens)
    return Answer("".join(reply.text for reply in replies), ids)


def tokenizer_ids(version: Path) -> Callable[[str], tuple[int, ...]]:
    """From the file itself: a sentencepiece model inside JSON, or one of Hugging Face's `tokenizers`."""
    file = version / "tokenizer.json"
    pieces = json.loads(file.read_text(encoding="utf-8")).get("beamline", {}).get("sentencepiece")
    if pieces is not None:
        sentencepiece = SentencePieceProcessor(model_proto=base64.b64decode(pieces))
        return lambda text: tuple(sentencepiece.encode(text))
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def byte_ids(text: str) -> tuple[int, ...]:
    """Of the fake models: a token for each byte, after three special ones."""
    return tuple(byte + 3 for byte in text.encode())


def newest(folder: Path) -> Path:
    return max((each for each in folder.iterdir() if each.name.isdigit()), key=lambda each: int(each.name))


def calls(project: Project, fake: bool, scratch: Path) -> Iterator[Call]:
    if fake:
        yield Call("Translate", None, "fake", translate, byte_ids)
        yield Call("Generate", None, "fake-lm", generate, byte_ids)
        return
    shipped = project.root / "model_repo"
    yield Call("Translate", shipped, "en-de", translate, tokenizer_ids(newest(shipped / "en-de")))
    support = importlib.import_module("tests.support.language_models")
    converted = support.convert_language_model(support.LLAMA, scratch)
    repository, name = converted.folder.parents[1], converted.folder.parent.name
    yield Call("Generate", repository, name, generate, tokenizer_ids(converted.folder))


async def pass_through(call: Call, profiler: Profiler) -> RequestPath:
    config = load("serving.config").ServeConfig(
        repository=call.repository,
        fake=call.repository is None,
        load=() if call.repository is None else (call.model,),
        grpc_port=0,
        metrics_port=0,
    )
    messages, stubs = load("protos.beamline_pb2"), load("protos.beamline_pb2_grpc")
    server = load("serving.server").Server(config)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            stub = stubs.InferenceStub(channel)
            await call.ask(stub, messages, call.model, WARM_UP, False)
            await profiler.quiet()
            path = RequestPath()
            profiler.record(path)
            await call.ask(stub, messages, call.model, TEXT, False)
            profiler.record(None)
            answer = await call.ask(stub, messages, call.model, TEXT, True)  # the same once more, with its ids
    finally:
        await server.drain()
        await server.stop()
    texts = tuple(filter(None, (TEXT, answer.text)))
    mark_carriers(path, RequestData(texts, (call.ids(TEXT), answer.ids)))
    return path


def show(call: Call, path: RequestPath) -> Iterator[str]:
    carriers = [kind for kind, carries in path.types.items() if carries]
    messages = sum(hasattr(kind, "DESCRIPTOR") for kind in carriers)
    yield (
        f"{call.name}: {len(path.modules)} modules, of which {len(path.handling)} handle it; "
        f"{len(carriers) - messages} types of ours and {messages} protobuf messages carry it, "
        f"of {len(path.types)} that it makes"
    )
    width = max(map(len, path.modules), default=0)
    for number, (module, function) in enumerate(path.modules.items(), start=1):
        yield f"  {number:3} {'*' if module in path.handling else ' '} {module:<{width}}  {function}"
    yield "  types, in order (* carries the request or its answer):"
    for kind, carries in path.types.items():
        yield f"    {'*' if carries else ' '} {kind.__module__}.{kind.__qualname__}"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.request_path", description=__doc__.splitlines()[0])
    parser.add_argument("--fake", action="store_true", help="the echo models of `serve --fake`: quick, no conversion")
    options = parser.parse_args()
    project = Project()
    profiler = Profiler(project)
    with tempfile.TemporaryDirectory() as scratch:
        for call in calls(project, options.fake, Path(scratch)):
            profiler.install()
            path = asyncio.run(pass_through(call, profiler))
            sys.setprofile(None)
            threading.setprofile(None)
            print("\n".join(show(call, path)), flush=True)


if __name__ == "__main__":
    main()
