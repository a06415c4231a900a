"""The errors of the load tester. Their texts are sentences for its user.

They are no errors of `beamline.errors`, on purpose: what a client raises is what a load test measures.
"""

from __future__ import annotations


class LoadTestError(Exception):
    """Nothing was measured: a wrong option or file, or a server that can't be reached."""
