"""Who is measured on what, and the rounds: every system in turn, again and again, so that all see the same weather."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.shape import sentences
from tests.benchmarks.workers import Answer, Worker, wait_for_quiet

BEAMLINE, BEAMLINE_INT8 = "ours", "ours int8"
FLOAT32, INT8, TRANSFORMERS, OPTIMUM = "CT2 fp32", "CT2 int8", "HF", "Optimum"


@dataclass(frozen=True)
class Case:
    batch: int
    beam: int
    slow: bool = False  # whether the slowest systems take part, too

    def __str__(self) -> str:
        return f"{self.batch} x {self.beam}"


CASES = (Case(1, 1), Case(1, 4, slow=True), Case(8, 1), Case(8, 4, slow=True), Case(32, 1), Case(32, 4))
SHORTLIST_CASES = (Case(1, 4), Case(8, 4), Case(32, 4))
QUICK_CASES = (Case(1, 4, slow=True), Case(8, 4))


@dataclass
class Measured:
    """By system: the answers of one case."""

    case: Case
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def best(self, system: str) -> Answer | None:
        return min(self.answers.get(system, ()), key=lambda answer: answer.seconds, default=None)

    def seconds(self, system: str) -> float | None:
        best = self.best(system)
        return None if best is None else best.seconds

    def identical(self, system: str) -> tuple[int, int]:
        """Of so many sentences, how many it translates as we do."""
        ours, theirs = self.best(BEAMLINE), self.best(system)
        if ours is None or theirs is None:
            return 0, 0
        pairs = zip(ours.tokens, theirs.tokens, strict=True)
        return sum(a == b for a, b in pairs), len(ours.tokens)


def measure(workers: Sequence[Worker], cases: Sequence[Case], rounds: int, patience: float) -> list[Measured]:
    """Ctrl-C ends the rounds early."""
    found = [Measured(case) for case in cases]
    for worker in workers:  # the first call of all allocates, packs and compiles
        worker.ask(sentences(1), 4)
    try:
        for number in range(rounds):
            print(f"round {number + 1} of {rounds} ...", flush=True)
            for measured in found:
                for worker in _taking_part(workers, measured.case):
                    wait_for_quiet(patience)
                    answer = worker.ask(sentences(measured.case.batch), measured.case.beam)
                    measured.answers.setdefault(worker.name, []).append(answer)
    except KeyboardInterrupt:
        print("interrupted; this is what there is", flush=True)
    return [measured for measured in found if BEAMLINE in measured.answers]


def _taking_part(workers: Sequence[Worker], case: Case) -> Iterable[Worker]:
    return (worker for worker in workers if case.slow or worker.name not in (TRANSFORMERS, OPTIMUM))
