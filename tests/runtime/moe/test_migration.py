"""Forecasts of loads, and the places that they ask for: judged by counting, not by the code that chose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.moe.rebalance_cases import Case, built, update
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.migration.candidates import MoveTerms, choose_places
from schedc_runtime.migration.forecast import forecast
from schedc_runtime.migration.price import move_time
from schedc_runtime.moe.load_history import KEPT, LoadHistory
from schedc_runtime.moe.placement import ExpertPlaces
from support.segmented_cases import COSTS
from support.sweeps import in_sweeps, swept

SIZES = [(2, 2, 8), (4, 2, 8), (8, 4, 32), (16, 4, 64), (3, 3, 9)]
"""Ranks, ranks of a node, experts."""


def fullest(share: np.ndarray, places: ExpertPlaces, bins: int) -> float:
    """Rows of the fullest of ``bins`` over the mean, by the order of places."""
    return float(share[list(places.order)].reshape(bins, -1).sum(1).max() * bins / share.sum())


@pytest.mark.slow
@pytest.mark.parametrize("by_node", [False, True])
@pytest.mark.parametrize(("ranks", "per_node", "experts"), SIZES)
def test_choices(ranks: int, per_node: int, experts: int, by_node: bool) -> None:
    """What a choice says of itself is counted again, and its net gain is above the threshold."""
    random = np.random.default_rng(experts)
    before, moved = ExpertPlaces.home(experts), 0
    bins = ranks // per_node if by_node else ranks
    for _ in range(20):
        share = random.permutation(random.random(experts) ** random.integers(1, 8))
        terms = MoveTerms(ranks, per_node, 0.01, 0.05, 10, 0.02, by_node)
        choice = choose_places(share, before, terms)
        local, (old, new) = experts // ranks, (np.array(each.places) for each in (before, choice.places))
        changed = old // local != new // local
        assert choice.moved == changed.sum()
        assert choice.before == pytest.approx(fullest(share, before, bins))
        assert choice.after == pytest.approx(fullest(share, choice.places, bins))
        sent = [np.sum(changed & (old // local == rank)) for rank in range(ranks)]
        assert 0.01 * max(sent) - 1e-9 <= choice.cost
        assert choice.moved == 0 or choice.gain - choice.cost / 10 > 0.02
        assert choice.moved or choice.places == before
        moved, before = moved + choice.moved, choice.places
    assert (moved > 0) == (bins > 1)


def test_a_choice_is_as_good_as_trying_all() -> None:
    """Two ranks of three experts: no placement of all 720 has a larger net gain, where moves are cheap."""
    from itertools import permutations

    random = np.random.default_rng(1)
    for _ in range(5):
        share = random.random(6) ** 3
        choice = choose_places(share, ExpertPlaces.home(6), MoveTerms(2, 2, 1e-6, 1e-6, 1000))
        best = min(fullest(share, ExpertPlaces(order), 2) for order in permutations(range(6)))
        assert choice.after <= best * 1.1


def test_dear_moves_stay_away() -> None:
    share = np.array([4.0, 3.0, 1.0, 1.0])
    cheap = choose_places(share, ExpertPlaces.home(4), MoveTerms(2, 2, 0.1, 0.1, 10))
    assert (cheap.moved, round(cheap.after, 3), round(cheap.payback, 3)) == (2, 1.111, round(0.1 / (4 / 9), 3))
    dear = choose_places(share, ExpertPlaces.home(4), MoveTerms(2, 2, 5.0, 5.0, 10))
    assert (dear.moved, dear.way, dear.places) == (0, "stay", ExpertPlaces.home(4))
    strict = choose_places(share, ExpertPlaces.home(4), MoveTerms(2, 2, 0.1, 0.1, 10, 0.5))
    assert strict.moved == 0


def test_groups_move_as_a_whole() -> None:
    """With units of two, partners stay side by side; units as large as a rank's experts leave nothing to gain."""
    share = np.array([5.0, 1.0, 4.0, 1.0, 0.5, 0.5, 1.0, 1.0])
    terms = MoveTerms(2, 2, 0.001, 0.001, 100, unit=2)
    choice = choose_places(share, ExpertPlaces.home(8), terms)
    assert choice.moved == 4
    pairs = np.array(choice.places.order).reshape(-1, 2)
    assert (pairs[:, 0] + 1 == pairs[:, 1]).all()
    assert (pairs[:, 0] % 2 == 0).all()
    assert choose_places(share, ExpertPlaces.home(8), MoveTerms(2, 2, 0.001, 0.001, 100, unit=4)).moved == 0
    torn = ExpertPlaces.home(8).swapped((0, 3))
    assert choose_places(share, torn, terms).places == torn


def test_forecast() -> None:
    """Steady loads are forecast by a mean, loads that move by the last step."""
    random = np.random.default_rng(0)
    steady = random.multinomial(500, np.arange(1, 9) / 36, size=20)
    assert forecast(steady).rule in ("mean of 10", "decay 0.9")
    drifting = np.array([np.roll([100, 50, 25, 12, 6, 3, 2, 1], step // 5) for step in range(20)])
    assert forecast(drifting).rule == "last"
    once = forecast(steady[:1])
    assert (once.rule, once.error) == ("last", 0.0)
    assert once.share == pytest.approx(steady[0] / 500)


def test_history_keeps_differences() -> None:
    history, chosen = LoadHistory(), torch.zeros(2, dtype=torch.int64)
    assert history.loads is None
    for step in range(KEPT + 3):
        if step == 5:
            chosen.zero_()
            history.cleared()
        chosen += torch.tensor([step, 1])
        history.note(chosen)
    assert history.loads is not None
    assert history.loads.tolist() == [[step, 1] for step in range(3, KEPT + 3)]


def test_price() -> None:
    """By bytes a move of 4 x rows' bytes takes the time of the rows; by costs it takes that of its dispatch."""
    assert move_time(400, 1, 100.0, 4, None) == 1.0
    dispatch, work = 9.0 * 4 / 3, 20 + 20 + 26  # per rail and node 9 each, of which the first two lanes count
    assert move_time(100, 1, 100.0, 4, COSTS) == pytest.approx(2 * dispatch / work)


@in_sweeps("runtime/moe/test_rebalance.py::test_training_goes_on")
@pytest.mark.sweep
@pytest.mark.slow
def test_a_plan_lets_experts_migrate() -> None:
    """Every second step experts move where that gains, and the state is that of a run without; beside copies, too.

    Copies make the ranks of a node even. Experts then move for the fullest node.
    """
    case = Case("1f1b", {"P": 1, "M": 2}, "  topology nodes 2 x 2\n  overlap auto\n")
    migrate = "  migrate every 2 steps when gain > 1 %\n"
    states, counts = [], []
    each_lines = swept(["", migrate, f"{migrate}  balance by step\n"], ["", f"{migrate}  balance by step\n"])
    for lines in each_lines:
        pipe, optimizer = built(case._replace(lines=case.lines + lines))
        for number in range(4):
            update(pipe, optimizer, number)
            if lines:
                result = pipe.rebalance(optimizer)
                counts.append(sum(result.experts.values()))
                assert bool(result.choices) == (number % 2 == 1)
                assert not any("of ranks" in text for text in result.choices.values() if "balance" in lines)
        states.append(pipe.full_state_dict())
        if not lines:
            with pytest.raises(RuntimeFault, match="the plan has no `migrate`"):
                pipe.rebalance(optimizer)
        pipe.close()
    assert counts[::2] == [0] * 2 * (len(each_lines) - 1)
    assert counts[1] > 0
    for name, value in states[0].items():
        for moved in states[1:]:
            torch.testing.assert_close(moved[name], value, rtol=0, atol=1e-12, msg=name)
