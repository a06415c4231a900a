"""The report as one HTML file that needs nothing else: no other host, no other file."""

from __future__ import annotations

import html
import json
from importlib import resources

from beamline.loadtest.report.document import Report


def page(report: Report) -> str:
    # The blocks are for comparing; the page does not draw them.
    data = report.model_dump(mode="json", exclude={"stages": {"__all__": {"blocks"}}})
    parts = {
        "title": html.escape(report.title),
        "style": _file("page.css"),
        "script": f"{_file('chart.js')}\n{_file('page.js')}",
        "report": _embedded(data),
    }
    template = _file("page.html")
    pieces = template.split("{{")
    # One pass: what a server said in an error detail may look like a placeholder.
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:]))


def _embedded(data: object) -> str:
    """JSON that can't end the script element it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
