from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from beamline.serving.engine.thread import FairShare


class Model:
    def __init__(self, name: str) -> None:
        self.name = name


def run(turns: FairShare[Model], busy: list[Model], costs: dict[str, float], steps: int) -> dict[str, float]:
    used = {model.name: 0.0 for model in busy}
    for _ in range(steps):
        model = turns.next(busy)
        turns.charge(model, costs[model.name])
        used[model.name] += costs[model.name]
    return used


@given(costs=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=5), steps=st.integers(10, 200))
@settings(max_examples=100)
def test_time_is_shared_equally_whatever_a_step_costs(costs: list[float], steps: int) -> None:
    models = [Model(str(number)) for number in range(len(costs))]
    used = run(FairShare(), models, {str(number): cost for number, cost in enumerate(costs)}, steps)
    assert max(used.values()) - min(used.values()) <= 2 * max(costs) + 1e-9


def test_who_comes_back_neither_catches_up_nor_waits() -> None:
    turns: FairShare[Model] = FairShare()
    steady, guest = Model("steady"), Model("guest")
    costs = {"steady": 1.0, "guest": 1.0}
    run(turns, [steady], costs, 100)
    used = run(turns, [steady, guest], costs, 10)
    assert used == {"steady": 5.0, "guest": 5.0}
    run(turns, [guest], costs, 50)
    assert run(turns, [steady, guest], costs, 10) == {"steady": 5.0, "guest": 5.0}


def test_steps_that_take_no_time_still_alternate() -> None:
    turns: FairShare[Model] = FairShare()
    models = [Model("a"), Model("b")]
    order = []
    for _ in range(6):
        model = turns.next(models)
        turns.charge(model, 0.0)
        order.append(model.name)
    assert order == ["a", "b"] * 3


def test_unloaded_models_leave_nothing_behind() -> None:
    turns: FairShare[Model] = FairShare()
    model = Model("gone")
    turns.charge(turns.next([model]), 1.0)
    del model
    assert len(turns._used) == 0


def test_a_model_in_the_place_of_one_that_is_gone_is_a_new_one() -> None:
    """Memory that was freed is used again, so an address says nothing."""
    turns: FairShare[Model] = FairShare()
    gone = Model("gone")
    turns.charge(turns.next([gone]), 5.0)
    address = id(gone)
    del gone
    others: list[Model] = []
    while len(others) < 10_000 and not (others and id(others[-1]) == address):
        others.append(Model("new"))
    assert id(others[-1]) == address
    assert turns.next([others[-1]]) is others[-1]
