"""What `--out DIR` holds after a run: report.json, report.html, report.md and requests.csv."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load.records import Records, write_csv
from beamline.loadtest.report.document import Report
from beamline.loadtest.report.markdown import markdown
from beamline.loadtest.report.page import page

_REPORT = "report.json"


def prepare(folder: Path, overwrite: bool = False) -> None:
    """Before the run, so that a folder that can't be written, or that holds another report, is refused at once."""
    if (folder / _REPORT).exists() and not overwrite:
        raise LoadTestError(f"{folder} holds a report already; name another folder with --out, or give --overwrite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LoadTestError(f"nothing can be written to {folder}: {error.strerror}") from error


def write(folder: Path, report: Report, records: Sequence[Records]) -> None:
    (folder / _REPORT).write_text(report.model_dump_json() + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page(report), encoding="utf-8")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    write_csv(folder / "requests.csv", enumerate(records, start=1))
