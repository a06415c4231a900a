"""The metrics of all replicas on one page, with the names that a single server gives them.

Each replica reports what it would show by itself, every few seconds; the page adds the label `instance`, by which
Prometheus knows servers apart (scrape it with `honor_labels`). So rules and dashboards made for servers fit replicas.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "REPORT_SECONDS", "Page", "merged"]

REPORT_SECONDS = 5.0
_FORGET_SECONDS = 3 * REPORT_SECONDS  # a replica that was silent for so long is gone

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?")
_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+) ")


class Page:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, str]] = {}

    def report(self, replica: str, exposition: str) -> None:
        """`exposition`: in Prometheus's text format."""
        self._reports[replica] = (self._clock(), exposition)

    def text(self) -> str:
        now = self._clock()
        self._reports = {
            replica: (since, text) for replica, (since, text) in self._reports.items() if now - since < _FORGET_SECONDS
        }
        return merged({replica: text for replica, (_, text) in sorted(self._reports.items())})


def merged(expositions: Mapping[str, str]) -> str:
    """All samples of a metric stand together, below its HELP and TYPE, as the format demands."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, exposition in expositions.items():
        label = f'instance="{replica}"'
        family = ""
        for line in exposition.splitlines():
            if (comment := _COMMENT.match(line)) is not None:
                family = comment[1]
                of_family = comments.setdefault(family, [])
                if line not in of_family:
                    of_family.append(line)
            elif (sample := _SAMPLE.match(line)) is not None:
                rest = line[sample.end() :]
                labels = f"{{{label},{rest}" if sample[2] else f"{{{label}}}{rest}"
                samples.setdefault(family, []).append(sample[1] + labels)
    lines = [line for family, of_family in comments.items() for line in (*of_family, *samples.get(family, ()))]
    return "\n".join(lines) + "\n" if lines else ""
