"""Rows of unequal cost: deals, orders and windows by hand and by their bounds, the sampler, packed steps, refusals."""

from __future__ import annotations

import json
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import schedc
from schedc_runtime import Checkpoints, Mesh, Pipeline
from schedc_runtime.data import (
    Lengths,
    RowCosts,
    RowLoader,
    Windows,
    deal,
    order,
    pricer_of,
)
from schedc_runtime.data import loader as loader_module
from schedc_runtime.data.drawn import places, shuffled
from schedc_runtime.data.even import even_bound, even_sums
from schedc_runtime.data.windows import DataPlace
from schedc_runtime.errors import RuntimeFault
from support import row_cases

pytestmark = pytest.mark.slow

COSTS = RowCosts.of_share(0.8, 256)
KEPT_PLACES = [268, 455, 363, 369, 439, 857]
KEPT_SHUFFLE = [0, 3, 6, 4, 7, 5, 1, 2]
"""What seeds have drawn since the first version. Other numbers would change the samples of runs that go on."""


# Costs.


def test_costs_follow_squares_and_sums() -> None:
    costs = RowCosts.of_milliseconds(squared=2e-6, linear=1e-3, constant=0.5)
    rows = [[1000], [500, 500], [10] * 100, []]
    expected = [2e-6 * sum(n * n for n in row) + 1e-3 * sum(row) + 0.5 for row in rows]
    assert costs.of(rows) / 1e9 == pytest.approx(expected, rel=1e-6)
    assert RowCosts.of_share(0.8, 256).of([[256], [64] * 4]) / 1e9 == pytest.approx([1.0, 0.4], rel=1e-6)


def test_fits_costs_of_measured_rows() -> None:
    rows = [[4096], [2048] * 2, [1024] * 4, [512] * 8, [2048], [512], [3000, 1000]]
    wanted = RowCosts.of_milliseconds(3e-6, 2e-3, 0.7)
    fitted = RowCosts.fit(rows, (wanted.of(rows) / 1e9).tolist())
    assert fitted.of(rows) == pytest.approx(wanted.of(rows), rel=1e-6)
    assert fitted.error < 1e-6
    # Times that shrink with length give no coefficient below 0, and an error that says so.
    falling = RowCosts.fit(rows, [1.0 / (1 + sum(row)) for row in rows])
    assert min(falling.squared, falling.linear, falling.constant) >= 0
    assert falling.error > 0.1


# Deals.


@pytest.mark.parametrize(("replicas", "experts", "microbatches", "rows"), [(4, 1, 8, 1), (4, 2, 8, 2), (6, 6, 5, 1)])
def test_deals_each_row_once(replicas: int, experts: int, microbatches: int, rows: int) -> None:
    costs = row_cases.costs_of_rows("log-normal", replicas * microbatches * rows, 3)
    dealt = deal(costs, microbatches, replicas, experts, rows)
    assert dealt.rows.shape == (replicas, microbatches, rows)
    assert sorted(dealt.rows.ravel().tolist()) == list(range(costs.size))
    assert (dealt.costs == costs[dealt.rows].sum(axis=2)).all()
    assert 1 <= dealt.bound.ratio <= dealt.unevenness < 1.01
    together = dealt.costs.reshape(-1, experts, microbatches).max(axis=1)
    if experts > 1:
        for group in costs[dealt.rows].reshape(-1, experts, microbatches, rows).swapaxes(1, 2):
            assert all(one.min() >= other.max() for one, other in pairwise(group)), "positions are of alike rows"
    assert all((dealt.group_costs(replica) == together[replica // experts]).all() for replica in range(replicas))


def test_rows_of_one_cost_are_dealt_in_their_order() -> None:
    """All ranks and versions deal them alike, whatever a sort does with equal costs."""
    for costs in ([1] * 8, [5, 5, 3, 3, 3, 3, 1, 1]):
        assert deal(np.array(costs), 4, 2, 2).rows[..., 0].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert even_sums(np.ones(6, np.int64), 2).tolist() == [[0, 2, 4], [1, 3, 5]]


def test_no_grouping_has_smaller_positions() -> None:
    costs = row_cases.costs_of_rows("log-normal", 6, 3)
    assert row_cases.better_positions(costs, 3, permutations(range(6))) == 0
    assert row_cases.better_positions(costs, 2, permutations(range(6))) == 0


@pytest.mark.parametrize("seed", range(4))
def test_no_sharing_undercuts_the_bound(seed: int) -> None:
    costs = np.random.default_rng(seed).integers(1, 40, 6).astype(np.int64) ** (1 + seed)
    for bins in (2, 3):
        sums = [costs[list(each)].reshape(bins, -1).sum(axis=1).max() for each in permutations(range(6))]
        own, bound = int(costs[even_sums(costs, bins)].sum(axis=1).max()), even_bound(costs, bins)
        assert bound.ratio * costs.sum() / bins <= min(sums) + 1e-6
        assert own == min(sums)


def test_the_bound_names_its_row() -> None:
    costs = np.array([5, 5, 100, 5, 5, 5, 5, 5])
    dealt = deal(costs, 2, 4)
    assert (dealt.bound.row, dealt.bound.ratio) == (2, 105 * 4 / 135)
    assert str(dealt) == "fullest replicas over the mean: 3.1111; no deal is below 3.1111, set by row 2"
    shared = deal(np.array([1, 1, 100, 1, 1, 1, 1, 1]), 2, 4, 2)  # two groups of two replicas, of four rows each
    assert (shared.bound.ratio, shared.unevenness) == (103 * 2 / 107, 103 * 2 / 107)
    # Five rows of 100 for four replicas: one replica has two.
    two = even_bound(np.array([100] * 5 + [1] * 7), 4)
    assert (two.row, two.ratio) == (4, 201 * 4 / 507)
    # Eight large rows for three replicas: two have three each, 317 together, and one of these has half at least.
    large = even_bound(np.array([50, 51, 52, 53, 54, 55, 56, 57, 1, 1, 1, 1]), 3)
    assert (large.row, large.ratio) == (0, 159 * 3 / 432)


@pytest.mark.parametrize(("name", "replicas", "each"), [("bimodal", 8, 8), ("log-normal", 64, 8), ("bimodal", 16, 32)])
def test_sums_come_near_the_bound(name: str, replicas: int, each: int) -> None:
    assert row_cases.uneven(name, replicas, each, 0) <= row_cases.EVEN


# Order.


def test_ordered_steps_are_shorter_and_as_predicted() -> None:
    ratios, errors = row_cases.ordered_steps(2, 8, 480)
    assert max(errors) < 1e-12
    assert max(ratios) < 0.95


def test_an_order_needs_as_many_microbatches_as_the_program_has() -> None:
    with pytest.raises(RuntimeFault, match="costs of 7 microbatches, the program has 8"):
        order(np.ones(7, np.int64), pricer_of(schedc.compile("1f1b", P=2, M=8)))


# Windows.


def test_draws_are_permutations_and_stay_as_they_are() -> None:
    for count in (1, 2, 3, 64, 65, 1000):
        assert sorted(places(np.arange(count), count, 3, 1).tolist()) == list(range(count))
    assert places(np.arange(6), 1000, 3, 1).tolist() != places(np.arange(6), 1000, 3, 2).tolist()
    assert places(np.arange(6), 1000, 3, 1).tolist() == KEPT_PLACES
    assert shuffled(8, 1, 2).tolist() == KEPT_SHUFFLE


def test_windows_sort_rows_into_steps_of_alike_rows() -> None:
    windows = Windows(4, 256, COSTS, steps=6, seed=1)
    costs = row_cases.costs_of_rows("bimodal", 24, 5)
    cut = windows.cut(costs, 0, 0)
    assert sorted(cut.ravel().tolist()) == list(range(24))
    spans = sorted((int(costs[step].min()), int(costs[step].max())) for step in cut)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert cut.tolist() != windows.cut(costs, 1, 0).tolist()
    equal = windows.cut(np.ones(24, np.int64), 0, 0)  # rows of one cost stay in the order in which they were packed
    assert sorted(equal.tolist()) == np.arange(24).reshape(6, 4).tolist()
    alone = Windows(24, 256, COSTS, seed=1)
    assert alone.cut(costs, 0, 0).tolist() == [list(range(24))]


def test_the_order_of_steps_follows_from_the_place_of_their_window() -> None:
    windows, lengths = Windows(4, 256, COSTS, steps=6, seed=1), Lengths(np.full(96, 200, np.int32))
    cuts = []
    for epoch, document in ((0, 0), (1, 0), (0, 24), (0, 48)):
        window = windows.at(DataPlace(epoch, document, 0), lengths)
        assert window is not None
        assert window.cut.tolist() == windows.cut(window.costs, epoch, document).tolist()
        cuts.append(window.cut[:, 0].tolist())
    assert all(one != other for one, other in combinations(cuts, 2))


def test_epochs_take_documents_once_and_in_another_order() -> None:
    documents, lengths = row_cases.drawn_documents(4_000, 256, 2)
    loader = row_cases.loader_of(documents, lengths, 2, 4, steps=1)
    by_epoch: dict[int, list[int]] = {}
    while True:
        next(loader)
        assert loader.last is not None
        if loader.last.place.epoch == 2:
            break
        place, following = loader.last.place, loader.last.following
        assert following.document == place.document + len(loader.last.documents)
        assert place.epoch in by_epoch or place.document == 0
        by_epoch.setdefault(loader.last.place.epoch, []).extend(loader.last.documents)
    loader.close()
    assert all(len(set(numbers)) == len(numbers) > 3_000 for numbers in by_epoch.values())
    assert by_epoch[0][:20] != by_epoch[1][:20]


# The loader.


def test_runs_go_on_in_a_window_with_other_replicas() -> None:
    cases, failed, _ = row_cases.sampler((1, 5), row_cases.SHAPES[:3], ordered=False)
    assert (cases, failed) == (6, [])


def test_batches_hold_the_documents() -> None:
    documents, lengths = row_cases.drawn_documents(6_000, 256, 2)
    loaders = [row_cases.loader_of(documents, lengths, 4, 4, experts=2) for _ in range(2)]
    windows = Windows(16, 256, COSTS, steps=4, seed=3)
    mine = RowLoader(documents, lengths, windows, schedc.compile("1f1b", P=2, M=4), mesh=Mesh(2, 2, 2), replica=2)
    for _ in range(3):
        batch, targets = next(loaders[0])
        tokens, numbers = batch["tokens"], batch["documents"]
        again, own = (next(loader)[0]["tokens"] for loader in (loaders[1], mine))
        assert torch.equal(tokens, again)
        assert torch.equal(own, tokens.reshape(4, 4, 256)[2])
        step = loaders[0].last
        assert step is not None
        pricer = pricer_of(schedc.compile("1f1b", P=2, M=4))
        for replica in range(4):
            assert (step.orders[replica] == order(step.deal.group_costs(replica), pricer)).all()
            for place, microbatch in enumerate(step.orders[replica]):
                row = step.rows[step.deal.rows[replica, microbatch, 0]]
                text = np.concatenate([documents[number] for number in row.documents]).tolist()
                assert tokens[4 * replica + place, : len(text)].tolist() == text
        given = []
        for row in range(len(tokens)):
            for number in numbers[row].unique().tolist():
                inside = numbers[row] == number
                given.append((tokens[row, inside].tolist(), targets[row, inside].tolist()))
        wanted = {tuple(documents[number].tolist()) for number in step.documents}
        real = [(text, after) for text, after in given if tuple(text) in wanted]
        assert len(real) == len(step.documents)
        assert all(after == [*text[1:], -100] for text, after in real)
        rest = [(text, after) for text, after in given if tuple(text) not in wanted]
        assert all(set(text) == {0} and set(after) == {-100} for text, after in rest)
    for loader in (*loaders, mine):
        loader.close()


def test_a_group_is_ordered_by_its_largest_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each position runs at the pace of its slowest replica, and all replicas that share experts take one order."""
    searched: list[list[int]] = []
    monkeypatch.setattr(loader_module, "order_rows", lambda costs, _: searched.append(costs.tolist()) or costs * 0)
    documents, lengths = row_cases.drawn_documents(6_000, 256, 2)
    for replica in range(4):
        windows, mesh = Windows(16, 256, COSTS, seed=3), Mesh(2, 2, 2)
        loader = RowLoader(documents, lengths, windows, schedc.compile("1f1b", P=2, M=4), mesh=mesh, replica=replica)
        step = loader._step(DataPlace(0, 0, 0))
        loader.close()
        group = step.deal.costs.reshape(2, 2, 4)[replica // 2]
        assert searched.pop() == group.max(axis=0).tolist()
        assert not searched
        assert group[0].tolist() != group[1].tolist()


def test_checkpoints_keep_the_place(tmp_path: Path) -> None:
    documents, lengths = row_cases.drawn_documents(6_000, 256, 2)

    def run(steps: int, microbatches: int) -> list[list[int]]:
        model = row_cases.gpt(256)
        pipe = Pipeline(model, schedc.compile("1f1b", P=1, M=microbatches), loss_fn=row_cases.summed)
        windows = Windows(4, 256, COSTS, steps=4, seed=3)
        loader = RowLoader(documents, lengths, windows, pipe.program)
        optimizer = torch.optim.SGD(pipe.parameters(), 1e-3)
        memory = tmp_path / "memory"
        memory.mkdir(exist_ok=True)
        saved = Checkpoints(tmp_path / "run", pipe, optimizer, data=loader, every=1, durable=1, memory=memory)
        given = []
        for _ in range(saved.resume(), steps):
            saved.train(*next(loader))
            assert loader.last is not None
            given.append(loader.last.documents)
            optimizer.step()
            optimizer.zero_grad()
        saved.close()
        loader.close()
        pipe.close()
        return given

    first, second = run(3, 4), run(6, 2)
    loader = row_cases.loader_of(documents, lengths, 1, 4, steps=4)
    loader.close()
    whole = RowLoader(documents, lengths, Windows(4, 256, COSTS, steps=4, seed=3), schedc.compile("1f1b", P=1, M=4))
    assert [*first, *second] == row_cases.samples(whole, 6)
    whole.close()


def test_a_state_is_json_and_of_the_same_data() -> None:
    documents, lengths = row_cases.drawn_documents(6_000, 256, 2)
    loader = row_cases.loader_of(documents, lengths, 1, 4)
    state = loader.state_dict()
    first = next(loader)[1]
    assert not torch.equal(next(loader)[1], first)
    loader.load_state_dict(json.loads(json.dumps(state)))
    assert torch.equal(next(loader)[1], first)
    for name, value in (("seed", 4), ("rows", 8), ("steps", 2), ("documents", 5_999), ("costs", [1, 1, 1])):
        with pytest.raises(RuntimeFault, match=f"data with {name} ="):
            loader.load_state_dict({**state, name: value})
    for name, place in (("step", 4), ("epoch", -1), ("document", None)):
        with pytest.raises(RuntimeFault, match="no place in the data"):
            loader.load_state_dict({**state, name: place})
    loader.close()


# Refusals.


def test_refuses_a_lengths_file_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "lengths.bin"
    np.array([3, 4, 5], "<i4").tofile(path)
    assert Lengths.open(path, 3).read(np.array([2, 0]), 8).tolist() == [5, 3]
    with pytest.raises(RuntimeFault, match="is too short: 12 bytes, lengths of 4 documents take 16"):
        Lengths.open(path, 4)
    with pytest.raises(RuntimeFault, match="is 12 bytes, lengths of 2 documents take 8"):
        Lengths.open(path, 2)
    with pytest.raises(RuntimeFault, match="cannot be read"):
        Lengths.open(tmp_path / "none.bin", 2)


def one_row(values: list[int], documents: Any, tokens: int = 8) -> None:
    loader = RowLoader(
        documents, Lengths(np.array(values, np.int32)), Windows(2, tokens, COSTS), schedc.compile("1f1b", P=1, M=2)
    )
    try:
        next(loader)
    finally:
        loader.close()


@pytest.mark.parametrize(
    ("values", "documents", "says"),
    [
        ([9, 9, 9], [], r"document \d has 9 tokens by lengths, a row holds 8"),
        ([0, 0, 0], [], r"document \d has 0 tokens by lengths, a row holds 8"),
        ([2], [[1, 2]], "1 documents do not fill the 2 rows of 8 tokens of a window"),
        ([8, 8], [[1, 2], [1, 2]], r"document \d has the shape \[2\], lengths says 8 tokens"),
    ],
)
def test_refuses_documents(values: list[int], documents: Any, says: str) -> None:
    with pytest.raises(RuntimeFault, match=says):
        one_row(values, documents)


def test_refuses_rows_that_do_not_divide() -> None:
    windows, program = Windows(12, 256, COSTS), schedc.compile("1f1b", P=2, M=4)
    lengths = Lengths(np.ones(4, np.int32))
    with pytest.raises(RuntimeFault, match="steps of 12 rows for 2 replicas of 4 microbatches"):
        RowLoader([], lengths, windows, program, mesh=Mesh(2, 1, 2))
    with pytest.raises(RuntimeFault, match="replica 3 of 3"):
        RowLoader([], lengths, windows, program, mesh=Mesh(2, 1, 3), replica=3)
    for case in ((0, 1, 1, 1), (2, 3, 2, 1), (2, 2, 1, 0)):
        with pytest.raises(RuntimeFault):
            deal(np.ones(4, np.int64), *case)
    for costs in (np.ones(5, np.int64), np.array([1, 1, 0, 1])):
        with pytest.raises(RuntimeFault, match="give each row a cost from 1 on"):
            deal(costs, 2, 2)
