"""ONNX Runtime's CUDA provider as the graphs of a version: sessions bound to device memory by address."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from beamline.serving.backends.capture_gate import gate_of
from beamline.serving.backends.cuda_runtime import forget_last_error
from beamline.serving.backends.device import DeviceTensor, Gpu, GraphSpec, is_lost, with_trim
from beamline.serving.backends.device_weights import DeviceWeights
from beamline.serving.backends.late_graphs import LateGraphs
from beamline.serving.backends.memory_messages import is_about_memory
from beamline.serving.backends.onnxruntime_cpu import Rewrite
from beamline.serving.backends.onnxruntime_tensors import bind, graph_spec, read_graph
from beamline.serving.backends.placement import CPU, CUDA, RECORD, describe, misplaced, placement
from beamline.serving.backends.weights import Weights
from beamline.serving.contract.manifest import AnyManifest, Manifest
from beamline.serving.errors import ComputeError, DeviceLost, ModelError, OutOfMemory
from beamline.serving.rewrites.scatters import with_scatters_in_place
from beamline.serving.rewrites.sizes import with_sizes_by_range
from beamline.serving.rewrites.splits import with_splits_as_slices

# So that nothing is copied from memory that is kept until a run is waited for.
REWRITES: tuple[Rewrite, ...] = (with_splits_as_slices,)
# So that a step copies nothing that grows with the vocabulary, and waits for nothing.
STEP_REWRITES: tuple[Rewrite, ...] = (with_sizes_by_range, with_scatters_in_place)
# cuDNN's: what they copy to the GPU comes from pinned memory that a session keeps until a run is waited for.
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
_RUNS_TO_WAIT = 32  # one of so many of an encoder's or a step's with such operators is
# Optimisations of its own that are left out. This one makes a split again of what was one.
_JOINS_SLICES = ("GatherSliceToSplitFusion",)
# It moves a cast before a transposition and gives the new one no version: then no kernel is found for it (1.31).
_BREAKS_HALF = ("MatmulTransposeFusion",)


class OnnxRuntimeCudaRunner:
    """`place` is where tensors are: cuda, or cpu in a test that runs the same code on host memory, where `launch` puts
    a run into the order that a stream would give it.

    A step can be recorded as a CUDA graph, by us: it runs on our stream, its sizes are computed by the host when it is
    recorded, and it copies nothing from pageable memory. The provider's own recording is for one shape per session."""

    own_contexts = False

    def __init__(
        self,
        folder: Path,
        manifest: AnyManifest,
        device: int,
        stream: int,
        options: Mapping[str, str] | None = None,
        place: str = "cuda",
        launch: Callable[[Callable[[], None]], None] = lambda work: work(),
        owner: Gpu | None = None,
    ) -> None:
        """`owner`: whose stream it is. Sessions still use it when they are closed, so it goes after them."""
        self.max_slots: int | None = None  # as many as fit
        self._launch = launch
        self._folder = folder
        self._manifest = manifest
        self._device = device
        self._place = place
        self._providers: list[Any] = [CPU] if place == "cpu" else [(CUDA, provider_options(device, stream, options))]
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._late = LateGraphs()
        self._keeping: dict[str, int] = {}  # graphs that keep pinned memory at every run: runs so far
        self._gpu = owner
        self._is_lost = functools.partial(is_lost, owner)
        weakref.finalize(self, _close, self._sessions, owner, device).atexit = False
        self._weights = Weights(folder, manifest)
        self._device_weights = None if owner is None else DeviceWeights(owner, place, device)
        with self._weights.in_memory():
            for name, file in manifest.graphs:
                if file is not None and name != "score":  # on first use
                    self._session(name)
        # A recording would read what its run has kept, again and again, when a later run has given it back.
        self.records = place == "cuda" and "step" not in self._keeping
        self._owner = owner  # the last attribute, which is let go last

    def spec(self, graph: str) -> GraphSpec:
        return graph_spec(self._session(graph))

    def cache_length(self, entries: int) -> int:
        return entries

    def most(self, graph: str, axis: str) -> int | None:
        return None

    def prepare(self, graph: str, tensors: Mapping[str, DeviceTensor], keep: bool = False) -> Callable[[], None]:
        session = self._session(graph)
        binding = session.io_binding()
        for each in session.get_inputs():
            bind(binding.bind_input, each.name, tensors[each.name], self._place, self._device)
        for each in session.get_outputs():
            bind(binding.bind_output, each.name, tensors[each.name], self._place, self._device)

        def run() -> None:
            try:
                session.run_with_iobinding(binding, _run_options(waits=self._waits(graph)))
            except Exception as error:
                forget_last_error()
                if self._is_lost():
                    raise DeviceLost(f"GPU {self._device} is lost: {error}") from error
                if is_about_memory(str(error)):
                    raise OutOfMemory(f"GPU {self._device}: {graph} needs more memory than is left: {error}") from error
                raise ComputeError(f"GPU {self._device}: {graph} failed: {error}") from error

        return lambda: self._launch(run)

    def _waits(self, graph: str) -> bool:
        """Whether the session gives back in this run what it keeps. Scores and classes are waited for anyway."""
        if graph not in self._keeping:
            return False
        self._keeping[graph] += 1
        return graph not in ("encoder", "prefill", "step") or self._keeping[graph] % _RUNS_TO_WAIT == 0

    def _session(self, graph: str) -> ort.InferenceSession:
        if graph not in self._sessions:
            with self._late.opening(graph):
                self._sessions[graph] = opened = with_trim(self._gpu, lambda: self._open(graph))
            if self._place == "cuda" and any(node.op_type in _RECURRENT for node in placement(opened)):
                self._keeping[graph] = 0
        return self._sessions[graph]

    def _open(self, graph: str) -> ort.InferenceSession:
        file = dict(self._manifest.graphs)[graph]
        assert file is not None
        path, without = self._folder / file.file, _left_out(self._manifest)
        rewrites = (*REWRITES, *STEP_REWRITES) if graph == "step" else REWRITES
        try:
            with self._weights.in_memory(), gate_of(self._device).opening():
                return open_session(
                    path, self._providers, self._place, without, self._weights, rewrites, self._device_weights
                )
        except Exception as error:
            forget_last_error()
            if self._is_lost():  # ONNX Runtime may call that too little memory
                raise DeviceLost(f"GPU {self._device} is lost: {error}") from error
            raise


def _close(sessions: dict[str, ort.InferenceSession], owner: Gpu | None, device: int) -> None:
    """When what they were asked for is over, and nothing is recorded: with a session go handles of cuBLAS and cuDNN,
    which wait for the whole device then.

    Those of a lost device are kept for ever: where one is closed, ONNX Runtime 1.31 throws in a destructor, which ends
    the process at once, and calls that wait for their answers with it. CUDA gives nothing back of a lost device before
    the process ends."""
    if owner is not None and not owner.drain():
        for session in sessions.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
        return
    with gate_of(device).opening():
        sessions.clear()


def _left_out(manifest: AnyManifest) -> tuple[str, ...]:
    """Models that classify or embed are in float32 always."""
    half = isinstance(manifest, Manifest) and manifest.precision in ("float16", "bfloat16")
    return (*_JOINS_SLICES, *_BREAKS_HALF) if half else _JOINS_SLICES


@functools.cache
def _run_options(waits: bool) -> ort.RunOptions:
    """The stream is ours, and so is the waiting, as a rule."""
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "0" if waits else "1")
    return options


def provider_options(device: int, stream: int, options: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, unless `options` say otherwise: memory grows by what is asked for, and nothing is tried out at run time."""
    return {
        "device_id": str(device),
        "user_compute_stream": str(stream),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",  # float32 means float32; half precision is a property of the graph
        **(options or {}),
    }


def open_session(
    path: Path,
    providers: list[Any],
    place: str,
    without: Sequence[str] = (),
    weights: Weights | None = None,
    rewrites: Sequence[Rewrite] = (),
    device_weights: DeviceWeights | None = None,
) -> ort.InferenceSession:
    """`without` are optimisations of ONNX Runtime's that are left out. A graph without `weights` has all it needs; of
    those, `device_weights` are shared by all sessions that are given the same ones."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 2
    settings.enable_mem_pattern = False  # shapes change from step to step
    said = ""
    if place == "cuda":
        said = preload()
        settings.log_severity_level = 3  # it warns of anything on the CPU; what may be there is checked below
        settings.add_session_config_entry(RECORD, "1")
    else:
        settings.intra_op_num_threads = 1
    try:
        graph = read_graph(path)
        for rewrite in rewrites:
            graph = rewrite(graph)
        if weights is not None:
            weights.hand_over(graph, settings)
            if device_weights is not None:
                device_weights.hand_over(graph, weights.content(), settings)
        # By itself it would print an error of CUDA's and try again on the CPU.
        session = ort.InferenceSession(
            graph.SerializeToString(),
            settings,
            providers=providers,
            disabled_optimizers=list(without),
            enable_fallback=0,
        )
    except OutOfMemory:
        raise
    except Exception as error:
        kind = OutOfMemory if is_about_memory(str(error)) else ModelError
        raise kind(f"{path} can't be loaded by ONNX Runtime: {error}") from error
    if place == "cuda":
        _check_placement(path, graph, session, said)
    return session


@functools.cache
def preload() -> str:
    """Loads CUDA's and cuDNN's libraries from where pip puts them, which the loader does not know, else from the
    system; once, before the first session. What ONNX Runtime says of those that it did not find is returned."""
    _preload_builtins()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ort.preload_dlls()
    return said.getvalue().strip()


def _preload_builtins() -> None:
    """NVRTC, with which cuDNN compiles, looks for its built-in functions by name when it is first used; CUDA 13.0's
    does not look beside itself."""
    with contextlib.suppress(metadata.PackageNotFoundError):  # CUDA is the system's then, and the loader knows it
        for file in metadata.files("nvidia-cuda-nvrtc") or ():
            if file.name.startswith("libnvrtc-builtins.so"):
                ctypes.CDLL(str(file.locate()))


def _check_placement(path: Path, graph: onnx.ModelProto, session: ort.InferenceSession, said: str) -> None:
    """A graph of which a part would run on the CPU is refused, instead of being quietly slow."""
    if CUDA not in session.get_providers():
        raise ModelError(
            f"{path}: ONNX Runtime left CUDA out and would use {', '.join(session.get_providers())}; "
            f"`beamline doctor` says what is missing{f'. ONNX Runtime says: {said}' if said else ''}"
        )
    placed = placement(session)
    if not any(node.on_cpu for node in placed):
        return
    wrong = misplaced(graph.graph, placed)
    if wrong:
        raise ModelError(
            f"{path}: ONNX Runtime's CUDA provider would leave {describe(wrong)} to the CPU, where only arithmetic on "
            "sizes may be; serve the model with --device cpu or tensorrt"
        )
