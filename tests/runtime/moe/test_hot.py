"""Hot experts by microbatch: one choice on all ranks, gradients as without them, nothing sent where nobody is hot."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import schedc
from runtime.moe.hot_cases import exchanged_bytes, gradients, layers_of, lent, pipeline, set_strength, skewed, step
from schedc.cell.graph import Lane
from schedc.cell.serial import serial
from schedc.cell.standard_blocks import stage_shape
from schedc.cell.table import read_table
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.counts import ABSENT, Shape, counts_of_experts
from schedc_runtime.moe.hot import HotChooser, Lending
from schedc_runtime.moe.hot_choice import MARGIN, HotPolicy, choose_hot
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.partition import partition
from schedc_runtime.ranks.expert_group import in_process_expert_groups
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.segments import stage_graph
from schedc_runtime.testing import pool
from support import segmented_cases
from support.segmented_cases import shuffled, together, unequal
from support.sweeps import in_sweeps, swept

pytestmark = pytest.mark.slow

# The choice.


@st.composite
def routings(draw: Any) -> tuple[int, np.ndarray]:
    """Experts of a rank, and everyone's choices [ranks, N, k]: skewed, some dropped, ranks with fewer tokens padded."""
    ranks, local = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    skew = draw(st.sampled_from([0.0, 0.6, 1.0, 3.0]))
    share = random.permutation(np.arange(1, ranks * local + 1) ** -skew)
    noise = np.log(share) + random.gumbel(size=(ranks, draw(st.integers(1, 12)), ranks * local))
    routing = noise.argsort(-1)[..., -draw(st.integers(1, ranks * local)) :]
    routing[random.random(routing.shape) < 0.1] = -1
    routing[random.random(routing.shape[:2]) < 0.1] = ABSENT
    return local, routing


@pytest.mark.sweep
@settings(max_examples=swept(150, 50))
@given(
    case=routings(),
    most=st.integers(1, 3),
    below=st.none() | st.floats(1, 2),
    pays=st.integers(0, 4),
    on=st.booleans(),
)
def test_what_is_lent(case: Any, most: int, below: float | None, pays: int, on: bool) -> None:
    local, routing = case
    ranks = len(routing)
    policy = HotPolicy(min(most, local), below, True, pays)
    choosers = [HotChooser(policy, ranks * local, rank, 1, 1, on) for rank in range(ranks)]
    table = counts_of_experts(torch.from_numpy(routing), Shape(ranks * local, 1, ranks)).rows.long()
    counts = table.numpy()
    lendings = [chooser.choose(table, count=True) for chooser in choosers]
    assert len({lending.hot for lending in lendings}) == 1
    hot = list(lendings[0].hot)
    assert hot == sorted(set(hot))
    assert len(hot) <= min(most, local)
    assert counts.sum() == (routing >= 0).sum()
    load = counts.sum(0).reshape(ranks, local).sum(1)
    if below is not None and load.max() < load.mean() * below * (1 if on else 1 + MARGIN):
        assert hot == []
    for expert in hot:
        assert counts[:, expert].sum() - counts[expert // local, expert] >= max(1, pays * (ranks - 1))
    # Where rows are computed: by their source, or by the owner of their expert.
    after = np.zeros(ranks, dtype=int)
    wide = local + len(hot)
    placed = lendings[0].placed(torch.from_numpy(routing)).numpy()
    for place in np.ndindex(*routing.shape):
        expert, number = int(routing[place]), int(placed[place])
        if expert < 0:
            assert number == expert
            continue
        owner = expert // local
        computes = place[0] if expert in hot else owner
        slots = lendings[computes].lent_to(computes)
        assert number // wide == computes
        assert number % wide == (expert % local if computes == owner else local + slots.index(expert))
        after[computes] += 1
    assert after.max() <= load.max()
    kept = [int(sum(counts[rank, expert] for expert in hot if expert // local != rank)) for rank in range(ranks)]
    assert [chooser.kept for chooser in choosers] == kept
    sends = [lending.copies.splits for lending in lendings]
    assert all(sends[a][0][b] == sends[b][1][a] for a in range(ranks) for b in range(ranks))
    assert sum(sum(send) for send, _ in sends) * 2 == sum(chooser.sent for chooser in choosers)


def test_of_equal_experts_and_ranks_the_first_is_lent() -> None:
    counts = torch.tensor([[0, 0, 4, 4, 4, 4, 0, 0]] * 4)
    assert choose_hot(counts, HotPolicy(1, None, True, 0)) == ()  # another rank would be fuller than the fullest is now
    assert choose_hot(counts, HotPolicy(2, None, True, 0)) == (2, 4)
    assert choose_hot(counts, HotPolicy(2, 1.5, True, 0)) == (2, 4)
    assert choose_hot(counts, HotPolicy(2, 2.5, True, 0)) == choose_hot(counts, HotPolicy(2, None, True, 5)) == ()
    assert choose_hot(torch.tensor([[0, 3, 3, 0]] * 2), HotPolicy(2, None, True, 0)) == (1, 2)
    assert choose_hot(torch.tensor([[0, 0], [9, 0]]), HotPolicy(1, None, True, 0)) == (
        0,
    )  # no fuller, and no row travels
    assert choose_hot(torch.tensor([[0, 0], [9, 1]]), HotPolicy(1, None, True, 0)) == ()


def test_once_off_the_threshold_is_higher() -> None:
    chooser = HotChooser(HotPolicy(1, 1.5, True, 0), 4, 0, 1, 1)

    def choose(rows: int) -> bool:
        counts = torch.tensor([[rows, 0, 100 - rows, 0]] * 2)
        hot = chooser.choose(counts, count=True).hot
        assert chooser.choose(counts, count=True).hot == hot  # the same again within a step
        chooser.end_step()
        return bool(hot)

    assert [choose(rows) for rows in (75, 74, 76, 79, 75, 74, 75)] == [True, False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda: HotPolicy(-1), "-1 hot experts"),
        (lambda: HotPolicy(1, 0.9), "until an imbalance below 0.9"),
        (lambda: HotPolicy(1, float("nan")), "until an imbalance below nan"),
        (lambda: HotPolicy(5).resolved(4, 8, 2), "5 hot experts, and each rank has 4 of its own"),
    ],
)
def test_refused(policy: Any, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        policy()


# The graph.


@pytest.mark.parametrize("method", ["flat", "hierarchical"])
def test_the_graph_has_one_exchange_more_and_none_without(method: Any) -> None:
    for hot in (HotPolicy(2, by_microbatch=True), HotPolicy(2), HotPolicy(0), None):
        model = skewed()
        shard_experts(model, in_process_expert_groups(4, 2)[0], method, hot=hot)
        (stage,) = partition(nn.Sequential(*model.blocks), 1, blocks="").modules
        shape = stage_graph(stage, 1, ["0"]).shape
        lends = hot is not None and hot.by_microbatch
        assert shape == stage_shape(["dense", "moe", "moe"], method, hot=Lane.RAIL if lends else None, balance=True)
        assert ("0.hot.rail" in shape.names) == lends


def test_a_cost_file_with_hot_has_the_exchange() -> None:
    table, findings = read_table({"dispatch": {"node": 3}, "hot": {"node": [2, 4]}})
    assert findings == []
    (shape,) = table.shapes(1)
    assert "0.hot.node" in shape.names
    assert table.costs.times(shape, shape.names.index("0.hot.node"))[:2] == (2, 4)


def test_with_a_capacity_nobody_is_hot() -> None:
    lines = "  experts 8 top 2\n  topology nodes 1 x 2\n  overlap auto\n  hot 2\n  capacity 1.25 drop probs"
    pipe = pipeline("1f1b", {"P": 1, "M": 1}, lines, skewed())
    assert [layer.hot for layer in layers_of(pipe)] == [None] * 4


# Training.

HOT = "  hot 2 by microbatch until imbalance < 1.2"


def lines_of(nodes: int, per_node: int, method: str) -> str:
    return f"  experts 8 top 2\n  topology nodes {nodes} x {per_node}\n  alltoall {method}\n  overlap auto\n"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("nodes", "per_node", "method", "strength"),
    [(2, 2, "hierarchical", 0.5), *swept([(1, 4, "flat", 3.0), (4, 1, "allgather", 1.0)], [])],
)
def test_gradients_are_those_without_hot_experts(nodes: int, per_node: int, method: str, strength: float) -> None:
    lines, sizes = lines_of(nodes, per_node, method), {"P": 1, "M": 2}
    without = pipeline("zbh1", sizes, lines, skewed(strength, seed=nodes))
    hot = pipeline("zbh1", sizes, lines + HOT, skewed(strength, seed=nodes))
    losses = [step(pipe) for pipe in (without, hot)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-14)
    assert lent(hot)["hot_rows"] > 0
    torch.testing.assert_close(gradients(hot), gradients(without), rtol=1e-9, atol=1e-12)
    if method == "flat":  # every row alone, so that all bytes are known; each carries its gate weight there and back
        counted = lent(hot)
        fewer = counted["hot_bytes_saved"] + 2 * 8 * counted["hot_rows"] - counted["hot_bytes_sent"]
        # Ranks gather two choices of 24 tokens in place of 8 counts, tokens and flags: 2 layers, 2 microbatches.
        more = 2 * 2 * 4 * 3 * (2 * 2 * 24 - 4 * (8 + 2))
        assert exchanged_bytes(without) - exchanged_bytes(hot) == fewer - more > 0


def test_methods_agree_bit_by_bit() -> None:
    results = []
    for method in ("flat", "hierarchical", "allgather"):
        pipe = pipeline("zbh1", {"P": 1, "M": 1}, lines_of(2, 2, method) + HOT, skewed(2.0))
        step(pipe)
        assert lent(pipe)["hot_rows"] > 0
        results.append(gradients(pipe))
    assert unequal(results[0], results[1]) == unequal(results[0], results[2]) == []


@in_sweeps("test_on_and_off_over_steps")
@pytest.mark.parametrize("line", ["  hot 2 by microbatch until imbalance < 50", "  hot auto by microbatch"])
def test_off_is_the_baseline_bit_by_bit(line: str) -> None:
    """Ranks that count as balanced, and experts too wide for a copy to pay (the last: with few tokens)."""
    lines, sizes = lines_of(2, 2, "hierarchical"), {"P": 1, "M": 2}
    inner = 2 if "until" in line else 64
    without = pipeline("zbh1", sizes, lines, skewed(3.0, inner=inner))
    off = pipeline("zbh1", sizes, lines + line, skewed(3.0, inner=inner))
    for pipe in (without, off):
        step(pipe)
    assert unequal(gradients(off), gradients(without)) == []
    assert lent(off) == {"hot_experts": 0, "hot_rows": 0, "hot_bytes_sent": 0, "hot_bytes_saved": 0}


def test_on_and_off_over_steps() -> None:
    """Balanced, skewed, balanced: baseline bits, lent experts, baseline bits."""
    lines, sizes = lines_of(1, 4, "flat"), {"P": 1, "M": 2}
    without = pipeline("zbh1", sizes, lines, skewed(0.0))
    hot = pipeline("zbh1", sizes, lines + "  hot 2 by microbatch until imbalance < 1.8", skewed(0.0))
    rows = []
    for strength in (0.0, 3.0, 0.0):
        for pipe in (without, hot):
            pipe.zero_grad()
            set_strength(pipe, strength)
            step(pipe)
        rows.append(lent(hot)["hot_rows"])
        if strength:
            torch.testing.assert_close(gradients(hot), gradients(without), rtol=1e-9, atol=1e-12)
        else:
            assert unequal(gradients(hot), gradients(without)) == []
        for pipe in (without, hot):
            pipe.update_biases()
    assert rows[0] == rows[2] == 0 < rows[1]


@pytest.mark.sweep
def test_any_legal_order_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def sharded(module: nn.Module, group: Any, method: Any, **_: Any) -> None:
        shard_experts(module, group, method, hot=HotPolicy(2, 1.1, True, 1))

    monkeypatch.setattr(segmented_cases, "shard_experts", sharded)
    build = partial(
        together, Mesh(1, 4, per_node=2), skewed(), schedc.compile("dualpipev", P=1, M=2), method="hierarchical"
    )
    serially = build(serial)
    serially.step()
    layers = [layer for held in serially.stages.values() for s in held.values() for _, layer in moe_layers(s.module)]
    assert sum(layer.statistics.hot_rows for layer in layers) > 0
    expected = serially.results()
    for seed in range(swept(2, 1)):
        mine = build(shuffled(seed))
        mine.step()
        for place, results in mine.results().items():
            assert unequal(results, expected[place]) == []


PROCESSES = [
    ("dualpipev", {"P": 1, "M": 2}, f"{lines_of(2, 2, 'hierarchical')}{HOT.replace('hot 2', 'hot auto')}"),
    ("1f1b", {"P": 1, "M": 2}, f"{lines_of(2, 2, 'hierarchical')}  hot 2 until imbalance < 1.1"),  # by step
]


@pytest.mark.sweep
@pytest.mark.processes
def test_processes() -> None:
    """Bit by bit what all ranks in one process give."""
    cases = swept(PROCESSES, PROCESSES[:1])
    ranks = pool(4).run("runtime.moe.hot_cases:parity", cases=cases, timeout=240)
    for answers in ranks:
        assert [case[:2] for case in answers] == [[[True, True], []]] * len(cases)
    for case in range(len(cases)):
        assert sum(answers[case][2]["hot_rows"] for answers in ranks) > 0


@pytest.mark.processes
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_called_as_a_module(frozen: bool) -> None:
    for error, rows, gradient in pool(4).run("runtime.moe.hot_cases:module", frozen=frozen, timeout=120):
        assert error < 1e-12
        assert rows > 0
        assert gradient != frozen


@pytest.mark.processes
def test_even_rows_of_a_layer_called_as_a_module() -> None:
    """Ranks without copies take part in the exchange that returns gradients."""
    for error, _, gradient in pool(4).run("runtime.moe.hot_cases:module", frozen=False, even=True, timeout=120):
        assert error < 1e-12
        assert gradient


def test_lending_of_one_rank() -> None:
    lending = Lending((1, 4, 5), 3, 1, 3)
    assert lending.places == [1, 2]
    assert lending.lent_to(1) == (1,)
    assert lending.copies.splits == ([2, 0, 2], [1, 0, 0])
