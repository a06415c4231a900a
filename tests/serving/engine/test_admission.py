from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beamline.serving.engine.queue import Admission
from beamline.serving.errors import Overloaded


def test_the_queue_has_an_end_and_says_when_to_come_back() -> None:
    admission = Admission("de", slots=2, max_queue=2)
    admission.enter(1, None, active=2)
    admission.enter(0, None, active=2)
    with pytest.raises(Overloaded, match="queue of de is full") as unknown:
        admission.enter(0, None, active=2)
    assert unknown.value.retry_after == 1.0
    admission.served(4.0)
    with pytest.raises(Overloaded) as measured:
        admission.enter(0, None, active=2)
    assert measured.value.retry_after == 2.0  # two wait for two slots, four seconds each: half of it
    admission.leave(1)
    admission.enter(3, None, active=2)
    assert admission.waiting == 2


def test_a_deadline_that_would_pass_in_the_queue_is_refused() -> None:
    admission = Admission("de", slots=2, max_queue=100)
    admission.enter(1, 0.001, active=2)  # nothing measured: the benefit of the doubt
    admission.served(1.0)
    # One is ahead: a slot in half a second each, then its own second.
    with pytest.raises(Overloaded, match=r"deadline is in 1.90 s.*about 2.00 s"):
        admission.enter(1, 1.9, active=2)
    admission.enter(1, 2.1, active=2)
    # The urgent one has nobody ahead of it.
    admission.enter(0, 1.6, active=2)
    with pytest.raises(Overloaded):
        admission.enter(0, 1.6, active=2)


def test_who_gets_a_slot_at_once_is_never_refused_for_its_deadline() -> None:
    admission = Admission("de", slots=2, max_queue=100)
    admission.served(10.0)
    admission.enter(1, 0.1, active=1)
    with pytest.raises(Overloaded):
        admission.enter(1, 0.1, active=1)  # the free slot is taken by the one before


def test_early_refusal_can_be_switched_off() -> None:
    admission = Admission("de", slots=1, max_queue=100, early_refusal=False)
    admission.served(10.0)
    admission.enter(1, 0.1, active=1)
    assert admission.waiting == 1


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.integers(0, 3), st.one_of(st.none(), st.floats(0.001, 100))),
            st.tuples(st.just("served"), st.floats(0, 50), st.none()),
            st.tuples(st.just("leave"), st.just(0), st.none()),
        ),
        max_size=60,
    ),
    max_queue=st.integers(1, 8),
)
@settings(max_examples=200)
def test_it_counts_and_always_gives_a_usable_hint(
    events: list[tuple[str, float, float | None]], max_queue: int
) -> None:
    admission, inside = Admission("de", 2, max_queue), list[int]()
    for kind, value, seconds in events:
        if kind == "served":
            admission.served(value)
        elif kind == "leave" and inside:
            admission.leave(inside.pop())
        elif kind == "enter":
            refused = refusal(admission, int(value), seconds)
            if refused is None:
                inside.append(int(value))
            else:
                assert refused.retry_after is not None
                assert 0.05 <= refused.retry_after <= 60
                assert len(inside) == max_queue or seconds is not None
        assert admission.waiting == len(inside) <= max_queue


def refusal(admission: Admission, priority: int, seconds: float | None) -> Overloaded | None:
    try:
        admission.enter(priority, seconds, active=2)
    except Overloaded as error:
        return error
    return None
