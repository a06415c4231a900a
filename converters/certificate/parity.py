"""`parity.json`: what a comparison with PyTorch found, beside what was allowed. It can be refused, and printed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

from beamline.serving.errors import ParityFailure

Row = tuple[str, str, str]  # what was compared, what was found, what is allowed


@dataclass(frozen=True)
class ParityCertificate(ABC):
    @abstractmethod
    def rows(self) -> list[Row]: ...

    @abstractmethod
    def problems(self) -> list[str]:
        """What is outside its tolerance, in sentences."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        rows = self.rows()
        width = max(len(row[0]) for row in rows)
        return "\n".join(f"  {name:<{width}}  {value:>10}  {limit}" for name, value, limit in rows)

    def check(self) -> None:
        if self.problems():
            reasons = "; ".join(self.problems())
            raise ParityFailure(f"the exported model is not the one that was brought: {reasons}\n{self.table()}")
