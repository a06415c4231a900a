"""Options and versions from the command line become those of `beamline.v1`."""

from __future__ import annotations

import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load.workload import only
from beamline.loadtest.targets.beamline_v1 import decoding_options
from beamline.loadtest.targets.target import model_and_version


def test_options_become_those_of_the_protocol():
    texts = {"beam_size": "4", "length_penalty": "0.6", "return_scores": "true", "target_prefix": "Das"}
    options = decoding_options((*texts.items(), ("early_stopping", "EARLY_STOPPING_NEVER")))
    assert (options.beam_size, options.return_scores, options.target_prefix) == (4, True, "Das")
    assert options.length_penalty == pytest.approx(0.6)
    assert options.early_stopping == 3
    with pytest.raises(LoadTestError, match="there is no option 'beams'"):
        decoding_options((("beams", "4"),))
    for name, value in (("beam_size", "four"), ("return_scores", "yes"), ("suppress_tokens", "3")):
        with pytest.raises(LoadTestError, match=f"option {name} can't be"):
            decoding_options(((name, value),))


def test_a_model_may_name_its_version():
    assert model_and_version("en-de/2") == ("en-de", "2")
    assert model_and_version("org/en-de") == ("org/en-de", "")
    assert only("x").choices == ("x",)
