"""The errors of the load tester. Their texts are sentences for its user.

`beamline.serving.errors` is not used on purpose: the load tester knows the wire and nothing else of ours.
"""

from __future__ import annotations


class LoadTestError(Exception):
    """Nothing was measured: a wrong option or file, or a server that can't be reached."""
