"""Writes docs/metrics.md from the declarations: `make docs`."""

from __future__ import annotations

import sys

from beamline.serving.telemetry.metrics import Declared, Metrics

_HEAD = """# Metrics

`/metrics` on the metrics port (8002). Written by `make docs` from `serving/telemetry/metrics.py`; a test checks that it
is current.

A *request* is one sequence in the engine: a text (decoded, scored or read), or a part of one that was split; a *call*
is what a client sends. Where several versions of a model are served at once, the label `model` is `name/version`.
Histograms have the usual `_bucket`, `_sum` and `_count`; times are in seconds.

A *slot* holds one request while it is decoded ([glossary](glossary.md)). A short queue now and then is what fills the
slots; one that stays longer than there are slots (`beamline_queue_length` above `beamline_slots` for minutes) means
that more is asked for than is decoded. [Alerts](fleet.md) for this and for what else can go wrong are in
`container/prometheus-rules.yml`.

"""

# Written here, and not taken from the APIs, which telemetry knows nothing of; a test compares.
_VALUES = """
Values of labels:

| metric | label | values |
|---|---|---|
| `beamline_requests_total` | outcome | `ok`, `cancelled`, `deadline`, `queue_timeout`, `failed` |
| `beamline_model_loads_total` | outcome | `loaded`, `failed`, `given_up` (after `--load-seconds`) |
| `beamline_refused_total` | reason | of calls: `invalid`, `model_not_found`, `model_unavailable`, `overloaded`, \
`shutting_down`, `unimplemented`, `slow_reader`, `unauthenticated`, `forbidden`; of connections: `connections`, \
`idle_connection`, `too_slow` |
| `beamline_calls_total` | method, code | the method's name, and gRPC's name of the status (`OK`, ...), over HTTP \
as well |
"""

_TRITON = """
## Triton's names

For dashboards that were made for Triton: names and labels are exactly its own, and times are sums of microseconds. Here
a request is a call, by any API, and an inference is one sequence of it. Queue and infer are added up over
sequences, input and output over calls; the host's part of the steps is in infer.

"""


def page() -> str:
    declared = Metrics().declared
    ours = [one for one in declared if not one.name.startswith("nv_")]
    return _HEAD + _table(ours) + _VALUES + _TRITON + _table([one for one in declared if one not in ours])


def _table(rows: list[Declared]) -> str:
    lines = ["| name | kind | labels | what it says |", "|---|---|---|---|"]
    lines += [f"| `{one.name}` | {one.kind} | {', '.join(one.labels) or '-'} | {one.text} |" for one in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
