"""Does a module follow the protocol? Every reason why not, with the place, before anything is written.

It is run in plain PyTorch, over a few shapes, each request alone and beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from beamline.converters.modules.search.tree import Tree
from beamline.converters.own.load import Origin
from beamline.converters.own.protocol import OwnModule, Settings, Step, Stepped
from beamline.serving.contract.manifest import StateKind, StateTensor
from beamline.serving.errors import UnsupportedCheckpoint

Answer = TypeVar("Answer")

LENGTHS = (5, 2, 1)  # of the sources in one batch
BEAMS = 3
STEPS = 3
CLOSE = 1e-4  # how far a result alone may be from the same one beside others, relative to its size
_METHODS = ("states", "encode", "initial_state", "step")


class Checker:
    def __init__(self, module: nn.Module, origin: Origin) -> None:
        self.module, self.origin = module, origin
        self.reasons: list[str] = []

    def check_interface(self) -> None:
        """Raises `UnsupportedCheckpoint` with what is wrong, as do the others, which need the weights."""
        self._go_through(self._interface, self._declarations)

    def check_shapes(self) -> None:
        self._go_through(self._shapes)

    def check_independence(self) -> None:
        """Of chance, of padding, and of the neighbours in a batch."""
        self._go_through(self._independence)

    def _go_through(self, *stages: Callable[[], None]) -> None:
        for stage in stages:
            with torch.no_grad():
                stage()
            if self.reasons:
                raise UnsupportedCheckpoint(f"{self.origin.file}:{self.origin.function}", self.reasons)

    # -- what it says of itself --------------------------------------------------------------------------------------

    def _interface(self) -> None:
        self.reasons += [
            f"it has no method {name!r}" for name in _METHODS if not callable(getattr(self.module, name, None))
        ]
        if not isinstance(getattr(self.module, "settings", None), Settings):
            self.reasons.append("its attribute 'settings' must be a beamline.converters.own.Settings")

    def _declarations(self) -> None:
        settings, declared = self.own.settings, self._call("states", lambda: list(self.own.states()))
        if declared is None:
            return
        if not all(isinstance(tensor, StateTensor) for tensor in declared):
            self.reasons.append("states() must return what memory(), recurrent() and cache() make")
            return
        names = [tensor.name for tensor in declared]
        self.reasons += [f"states() declares {name!r} twice" for name in sorted(set(names)) if names.count(name) > 1]
        if "source_mask" in names:
            self.reasons.append("states() declares 'source_mask', which every step gets anyway: leave it out")
        if all(tensor.kind is StateKind.MEMORY for tensor in declared):
            self.reasons.append(
                "states() declares no recurrent state and no cache: nothing would change from step to step"
            )
        for side, size in (("target", settings.target_vocab_size), ("source", settings.source_vocab_size)):
            ids = {"pad_id": settings.pad_id}
            if side == "target":
                ids |= {"decoder_start_id": settings.decoder_start_id}
                ids |= {f"eos_ids[{number}]": word for number, word in enumerate(settings.eos_ids)}
            self.reasons += [
                f"settings.{name} is {word}, outside the {side} vocabulary of {size}"
                for name, word in ids.items()
                if not 0 <= word < size
            ]
        if not settings.eos_ids:
            self.reasons.append("settings.eos_ids is empty: no output could end")

    # -- what it does ------------------------------------------------------------------------------------------------

    @property
    def own(self) -> OwnModule:
        return cast(OwnModule, self.module)

    def _call(self, what: str, run: Callable[[], Answer]) -> Answer | None:
        try:
            return run()
        except Exception as error:
            self.reasons.append(f"{what} failed: {self.origin.describe(error)}")
            return None

    @contextmanager
    def _placed(self, method: str) -> Iterator[None]:
        """What is found meanwhile is said with the line where the method begins."""
        before = len(self.reasons)
        yield
        place = self.origin.place_of(getattr(self.module, method))
        self.reasons[before:] = [f"{reason}{place}" for reason in self.reasons[before:]]

    def _sources(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        source = torch.randint(0, self.own.settings.source_vocab_size, (len(LENGTHS), LENGTHS[0]), generator=generator)
        mask = torch.arange(LENGTHS[0])[None, :] < torch.tensor(LENGTHS)[:, None]
        return torch.where(mask, source, self.own.settings.pad_id), mask

    def _shapes(self) -> None:
        self._answers("", *self._sources(), BEAMS)

    def _independence(self) -> None:
        source, mask = self._sources()
        together = self._answers("", source, mask, BEAMS)
        if together is None:
            return
        again = self._answers("", source, mask, BEAMS)
        if again is None or self._different(
            together, again, slice(None), "is random: it changes from one call to the next"
        ):
            return
        noise = torch.where(mask, source, (source + 1) % self.own.settings.source_vocab_size)
        if (spoilt := self._answers("with other words behind the end, ", noise, mask, BEAMS)) is None:
            return
        if self._different(together, spoilt, slice(None), "depends on what stands behind a source's end"):
            return
        for row, length in enumerate(LENGTHS):
            where = f"for one source of {length}, "
            alone = self._answers(where, source[row : row + 1, :length], mask[row : row + 1, :length], 1)
            if alone is None:
                return
            why = (
                f"for a source of {length} is not the same alone as in a batch of {len(LENGTHS)} with {BEAMS} beams"
                " (is source_mask used wherever positions are looked at together?)"
            )
            if self._different(together, alone, slice(row, row + 1), why):
                return

    def _answers(self, where: str, source: Tensor, mask: Tensor, beams: int) -> dict[str, Tensor] | None:
        """All that it returns over a few steps, by name; None where something is wrong with it."""
        tensors = list(self.own.states())
        axes = {"B": source.shape[0], "K": beams, "S": source.shape[1], "C": beams * STEPS}
        memory = self._call(f"{where}encode", lambda: self.own.encode(source, mask))
        if memory is None:
            return None
        with self._placed("encode"):
            self._named(f"{where}encode", memory, tensors, StateKind.MEMORY, axes)
        if self.reasons:
            return None
        start = self._call(f"{where}initial_state", lambda: self.own.initial_state(memory))
        if start is None:
            return None
        with self._placed("initial_state"):
            self._named(f"{where}initial_state", start, tensors, StateKind.RECURRENT, axes)
        if self.reasons:
            return None
        memories = [tensor for tensor in tensors if tensor.kind is StateKind.MEMORY]
        answers = {f"encode's {tensor.name!r}": _cut(tensor, memory[tensor.name], mask) for tensor in memories}
        answers |= {f"initial_state's {name!r}": tensor for name, tensor in start.items()}

        states = {t.name: torch.zeros(_sizes(t.shape, axes)) for t in tensors if t.kind is StateKind.CACHE}
        for name, tensor in start.items():
            states[name] = tensor[:, None].expand(-1, beams, *tensor.shape[1:])
        sees_source = any("S" in tensor.shape for tensor in tensors)
        ancestry = torch.zeros(source.shape[0], beams, beams * STEPS, dtype=torch.bool)
        own = torch.arange(beams)[None, :].expand(source.shape[0], -1)
        for number in range(STEPS):
            tree = Tree.grow(ancestry, torch.full((source.shape[0],), number * beams))
            words = torch.arange(beams) + self.own.settings.decoder_start_id + number
            tokens = (words % self.own.settings.target_vocab_size)[None, :].expand(source.shape[0], -1)
            positions = torch.full((source.shape[0],), number)
            now = Step(tokens, positions, memory, states, mask if sees_source else None, tree)
            what = f"{where}step {number + 1}" if number else f"{where}step"
            stepped = self._call(what, lambda now=now: self.own.step(now))  # type: ignore[misc]
            if stepped is None:
                return None
            with self._placed("step"):
                self._stepped(what, stepped, tensors, axes)
            if self.reasons:
                return None
            answers[f"step {number + 1}'s 'logits'"] = stepped.logits[:, :1]
            states, ancestry = dict(stepped.states), tree.ancestry_of(own)
        return answers

    def _named(
        self,
        what: str,
        found: object,
        tensors: Sequence[StateTensor],
        kind: StateKind,
        axes: Mapping[str, int],
        keep_beams: bool = False,
    ) -> None:
        """A dict with exactly the declared tensors of a kind, each of its shape and type."""
        if not isinstance(found, Mapping):
            self.reasons.append(f"{what} returned {type(found).__name__}; it must be a dict of tensors by name")
            return
        wanted = {tensor.name: tensor for tensor in tensors if tensor.kind is kind}
        self.reasons += [
            f"{what} did not return {name!r}, which states() declares" for name in wanted if name not in found
        ]
        known = {tensor.name for tensor in tensors}
        if kind is not StateKind.MEMORY:  # what else `encode` returns is for `initial_state`
            self.reasons += [
                f"{what} returned {name!r}, which states() does not declare" for name in found if name not in known
            ]
        for name, tensor in wanted.items():
            if name in found:
                axis_names = [axis for axis in tensor.shape if keep_beams or axis != "K"]
                self._tensor(f"{what}: {name!r}", found[name], axis_names, axes, tensor.dtype)

    def _stepped(self, what: str, found: object, tensors: Sequence[StateTensor], axes: Mapping[str, int]) -> None:
        if not isinstance(found, Stepped):
            self.reasons.append(f"{what} returned {type(found).__name__}; it must be a beamline.converters.own.Stepped")
            return
        words = self.own.settings.target_vocab_size
        self._tensor(f"{what}: 'logits'", found.logits, ["B", "K", words], axes, "float32")
        if found.attention is not None:
            self._tensor(f"{what}: 'attention'", found.attention, ["B", "K", "S"], axes, "float32")
        for kind in (StateKind.RECURRENT, StateKind.CACHE):
            self._named(what, found.states, tensors, kind, axes, keep_beams=True)

    def _tensor(
        self, what: str, found: object, shape: Sequence[str | int], axes: Mapping[str, int], dtype: str
    ) -> None:
        if not isinstance(found, Tensor):
            self.reasons.append(f"{what} is {type(found).__name__}, not a tensor")
            return
        wanted = _sizes(shape, axes)
        if list(found.shape) != wanted:
            names = ", ".join(f"{axis} = {axes[axis]}" if isinstance(axis, str) else str(axis) for axis in shape)
            self.reasons.append(f"{what} has shape {list(found.shape)}; it must be [{names}]")
        elif str(found.dtype) != f"torch.{dtype}":
            self.reasons.append(f"{what} is {str(found.dtype).removeprefix('torch.')}; it must be {dtype}")
        elif found.is_floating_point() and not found.isfinite().all():
            self.reasons.append(f"{what} has values that are not finite")

    def _different(self, together: Mapping[str, Tensor], other: Mapping[str, Tensor], rows: slice, why: str) -> bool:
        for name, tensor in together.items():
            mine, theirs = tensor[rows].double(), other[name].double()
            same = tuple(slice(0, min(a, b)) for a, b in zip(mine.shape, theirs.shape, strict=True))
            difference = (mine[same] - theirs[same]).abs().max().item()
            if difference > CLOSE * max(1.0, theirs.abs().max().item()):
                self.reasons.append(f"{name} {why}: by {difference:.2g}")
                return True
        return False


def _sizes(shape: Sequence[str | int], axes: Mapping[str, int]) -> list[int]:
    return [axes[axis] if isinstance(axis, str) else axis for axis in shape]


def _cut(declared: StateTensor, tensor: Tensor, mask: Tensor) -> Tensor:
    """Without what stands behind a source's end, which no step sees."""
    shape = declared.shape
    if "S" not in shape:
        return tensor
    place = shape.index("S")
    seen = mask.reshape([mask.shape[0], *(mask.shape[1] if axis == place else 1 for axis in range(1, len(shape)))])
    return torch.where(seen, tensor, torch.zeros((), dtype=tensor.dtype))
