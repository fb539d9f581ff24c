"""Copies of experts for a step: who borrows what, and how microbatches divide their rows among homes and copies."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc_runtime.moe.forest import computed_rows, limits
from schedc_runtime.moe.step_plan import Held, StepQuotas, plan_step, plan_step_among

CPU = torch.device("cpu")


def fullest(rows: torch.Tensor) -> float:
    """Most over mean of rows by rank."""
    return float(rows.max() / rows.double().mean())


def planned(step: torch.Tensor, slots: int = 3) -> Held:
    """The copies after a step of rows [microbatches, ranks, experts of a rank]."""
    squares = step.sum(2).square().sum(0)
    return plan_step(step.sum(0).flatten().tolist(), squares.tolist(), len(step), slots)


@settings(max_examples=60)
@given(
    ranks=st.integers(2, 9),
    local=st.integers(1, 6),
    slots=st.integers(1, 4),
    skew=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_a_rank_borrows_from_one_other_and_gets_no_more_rows_than_it_lacks(
    ranks: int, local: int, slots: int, skew: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    likely = torch.randn(ranks, local, generator=generator, dtype=torch.float64).mul(skew).exp()
    step = torch.poisson((100 * likely / likely.mean()).expand(4, -1, -1), generator=generator).long()
    held = planned(step, slots)
    homes = [{expert // local for expert in experts} for experts in held]
    assert all(len(each) <= 1 and rank not in each for rank, each in enumerate(homes))
    assert all(len(set(experts)) == len(experts) <= slots for experts in held)
    if not any(held):
        return
    quotas = StepQuotas.of(held, local, CPU)
    for rows in (*step, torch.zeros_like(step[0]), step[0].flip(0)):
        forest, _ = quotas.divide(rows)
        computed = computed_rows(rows, forest)
        assert int(computed.min()) >= 0
        assert torch.equal(computed.sum(0), rows)
        lent = torch.zeros(ranks, ranks * local, dtype=torch.bool)
        for rank, experts in enumerate(held):
            lent[rank, list(experts)] = True
        own = torch.eye(ranks, dtype=torch.bool).repeat_interleave(local, 1)
        assert not bool(computed.flatten(1)[~(lent | own)].any())
        load, after = rows.sum(1), computed.sum((1, 2))
        below = quotas.below - torch.diag(quotas.below.diag())
        leaves = below.sum(1) == 0
        assert bool((after <= torch.maximum(load, limits(load, Fraction(1))))[leaves].all())


def test_ranks_become_even_where_copies_can_make_them_so() -> None:
    """Popularity by Zipf's law on 8 ranks with 8 experts: microbatches of the next step, drawn anew."""
    generator = torch.Generator().manual_seed(0)
    likely = torch.arange(1, 65, dtype=torch.float64).pow(-0.6)[torch.randperm(64, generator=generator)]
    step = torch.poisson((300 * likely / likely.mean()).view(8, 8).expand(32, -1, -1), generator=generator).long()
    quotas = StepQuotas.of(planned(step[:16]), 8, CPU)
    before = [fullest(rows.sum(1)) for rows in step[16:]]
    after = [fullest(computed_rows(rows, quotas.divide(rows)[0]).sum((1, 2))) for rows in step[16:]]
    assert min(before) > 1.2
    assert sum(after) / 16 < 1.01
    assert max(after) < 1.04


def test_a_tree_of_four_ranks() -> None:
    """Rank 2 lacks most, then 1: they hang under the fullest. Rank 3 then lacks the rows that rank 1 gets."""
    table = torch.tensor([[205, 100, 80], [220, 0, 0], [60, 40, 39], [100, 100, 80]])
    held = planned(table.expand(8, -1, -1))
    assert held == ((), (9,), (0,), (0,))
    forest, _ = StepQuotas.of(held, 3, CPU).divide(table)
    assert forest.parent.tolist() == [0, 3, 0, 0]
    assert computed_rows(table, forest).sum((1, 2)).tolist() == [256, 256, 256, 256]


def test_each_node_plans_for_itself() -> None:
    """Copies and divided rows of two nodes are those of each node alone; rows of one vary more."""
    generator = torch.Generator().manual_seed(1)
    likely = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64).mul(0.6).exp()
    step = torch.poisson((200 * likely).expand(6, -1, -1, -1), generator=generator).long()
    step[::2, 1] += torch.arange(0, 120, 10).view(4, 3)
    rows = step.flatten(1, 2)
    squares = rows.sum(2).square().sum(0).tolist()
    held = plan_step_among(rows.sum(0).flatten().tolist(), squares, 6, 3, 4)
    parts = [planned(step[:, node], 3) for node in (0, 1)]
    assert held == (*parts[0], *(tuple(12 + expert for expert in experts) for experts in parts[1]))
    both, _ = StepQuotas.of(held, 3, CPU, 4).divide(rows[1])
    for node, part in enumerate(parts):
        alone, _ = StepQuotas.of(part, 3, CPU).divide(step[1, node])
        mine = slice(4 * node, 4 * node + 4)
        assert torch.equal(both.parent[mine], alone.parent + 4 * node)
        assert torch.equal(both.quota[mine], alone.quota)


def test_even_ranks_borrow_nothing() -> None:
    even = torch.full((5, 4, 3), 40)
    assert planned(even) == ((), (), (), ())
    assert planned(even * 0) == ((), (), (), ())
    even[:, 0, 0] += 1
    even[:, 1, 1] -= 1
    assert not any(planned(even * 100)[2:])


def test_among_equals_the_lower_rank_comes_first() -> None:
    """Ranks 1 and 2 lack as much: 1 hangs first, under the fullest. Ranks 0 and 1 have as much: 0 lends."""
    loads = torch.tensor([[150], [60], [60], [130]])
    assert planned(loads.expand(4, -1, -1))[1:3] == ((0,), (3,))
    loads = torch.tensor([[140], [140], [20]])
    assert planned(loads.expand(4, -1, -1))[2] == (0,)


def test_noise_widens_what_a_rank_borrows() -> None:
    """Rank 1 lacks 100 rows, and the first expert of its parent has 105."""
    steady = torch.tensor([[105, 65, 65, 65], [100, 0, 0, 0]]).expand(2, -1, -1)
    assert planned(steady) == ((), (0,))
    noisy = steady + torch.tensor([[[5], [-5]], [[-5], [5]]]) * torch.tensor([0, 1, 0, 0])
    assert planned(noisy) == ((), (0, 1))


def test_copies_that_few_ranks_have_are_filled_first() -> None:
    table = torch.tensor([[260, 140, 100], [0, 0, 0], [100, 0, 0]])
    held = planned(table.expand(4, -1, -1))
    assert held == ((), (0,), (1, 0))
    forest, _ = StepQuotas.of(held, 3, CPU, 3).divide(table)
    assert forest.quota.tolist() == [[0, 0, 0], [200, 0, 0], [0, 100, 0]]
    both, _ = StepQuotas.of(((), (0,), (0,)), 1, CPU, 3).divide(torch.tensor([[100], [0], [0]]))
    assert both.quota.tolist() == [[0], [33], [33]]
    scarce, left = StepQuotas.of(((), (0,), (0,)), 2, CPU, 3).divide(torch.tensor([[40, 140], [0, 0], [0, 0]]))
    assert scarce.quota.tolist() == [[0, 0], [40, 0], [0, 0]]
    assert left.tolist() == [0, 20, 60]
