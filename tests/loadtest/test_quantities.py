"""Durations, shares and rates, read and written."""

from __future__ import annotations

import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.quantities import (
    format_duration,
    format_rate,
    format_share,
    parse_duration,
    parse_rate,
    parse_share,
)


def test_durations_are_read_and_written():
    assert [parse_duration(text) for text in ("500ms", "2s", "1.5m", "0", "250 us")] == [
        0.5,
        2,
        90,
        0,
        pytest.approx(25e-5),
    ]
    assert [parse_share(text) for text in ("1%", "0", "100 %", "0.5%")] == [0.01, 0, 1, 0.005]
    assert [parse_rate(text) for text in ("5", "5/s", "0.5 / s")] == [5, 5, 0.5]
    assert [format_duration(value) for value in (0.0005, 0.0123, 0.5, 2, 90)] == [
        "500 µs",
        "12.3 ms",
        "500 ms",
        "2.00 s",
        "1.5 min",
    ]
    assert (format_rate(1234.5), format_share(0.0123), format_duration(None)) == ("1234/s", "1.23 %", "-")
    for text in ("", "fast", "-1s", "5 parsecs"):
        with pytest.raises(LoadTestError, match="is no duration"):
            parse_duration(text)
    for text in ("", "many", "101%", "-1%", "nan%", "5/s"):
        with pytest.raises(LoadTestError, match="is no share; write 0% to 100%"):
            parse_share(text)
    for text in ("", "a", "5/m", "nan", "-5"):
        with pytest.raises(LoadTestError, match="is no rate; write 5 or 5/s"):
            parse_rate(text)
