"""Explains the codes of family S1 about directives of a plan: experts, cells, capacity, recomputation, others."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode


def _plan(lines: str, schedule: str = "1f1b(P = 2, M = 4)") -> str:
    return f"plan a = {schedule} {{\n  layers 4\n  {lines}\n}}\n"


def _code(code: str, title: str, explanation: str, *, wrong: str, right: str) -> DiagnosticCode:
    return DiagnosticCode(code, title, explanation, wrong=_plan(wrong), right=_plan(right))


_MOE = "experts 64 top 8 width 64 hidden 256   topology nodes 2 x 4"

S1_PLANS: tuple[DiagnosticCode, ...] = (
    _code(
        "S145",
        "numbers of experts that do not fit",
        "A token takes the `top` k experts, where k is from 1 to all of them. With `groups g limit n` it takes them "
        "from n of g equal groups, which hold at least k experts. Every rank of the `topology` holds equally many "
        "experts. A plan with experts has a layer that is not dense.",
        wrong="experts 64 top 8 groups 8 limit 0",
        right="experts 64 top 8 groups 8 limit 4",
    ),
    _code(
        "S146",
        "a quantity of a plan that means nothing",
        "Speeds are written `50 GB/s`, `400 Gbit/s`, `10 GiB/s`. Memory is in KB to TB or KiB to TiB, or has no unit "
        "in the whole plan. If memory is in bytes, `activations` must say what every kind of layer holds. For MoE "
        "layers it may also follow from `experts ... width F hidden H` and `tokens`. With `recompute ... "
        "adaptive(s)`, these lines and the `topology` also bound the number of rows. Nodes, ranks and tokens are "
        "numbers from 1. So is an imbalance: the rows of the fullest rank over the mean.",
        wrong="experts 64 top 8   topology nodes 2 x 4 rail 50",
        right="experts 64 top 8   topology nodes 2 x 4 rail 50 GB/s",
    ),
    DiagnosticCode(
        "S147",
        "an order of a cell that cannot be read, or that nothing follows",
        "`cell F & B` or `cell F & I` gives each lane its steps. Steps of `compute` are F.role, B.role.I or B.role.W "
        "with the roles attention, permute, relay, experts, relay_back, shared and post. Steps of `comm` are F.role "
        "or B.role with routing, distinct, dispatch, combine, hot and balance. `attn` and `mlp` are attention and "
        "experts. A step is written once; steps that are left out are placed where they fit. The schedule must have "
        "such pairs.",
        wrong=_plan("cell F & B { compute F.atention }", "dualpipev(P = 2, M = 8)"),
        right=_plan("cell F & B { compute F.attention }", "dualpipev(P = 2, M = 8)"),
    ),
    _code(
        "S149",
        "a recomputation that cannot be read, or of nothing",
        "A line is `recompute`, then `all`, `chunk 0`, `stage 3` or `stage [0, 3]`, then a level (none, norm, act, "
        "light, medium, full, layer). `adaptive(s)` with `by rank` or `by group`, or `in bubbles`, may follow. The "
        "schedule must have these chunks and stages at its sizes. A line for a stage overrides a line for its chunk, "
        "and this a line for all. Two lines for the same stages contradict each other. A stage for which the "
        "schedule has Rs cannot recompute `none`.",
        wrong="recompute chunk 1 light",
        right="recompute chunk 0 light",
    ),
    _code(
        "S150",
        "a recomputed region with a collective, decided by each rank",
        "The level `full` repeats dispatch and combine in the backward. These are collectives: if one rank starts "
        "them and another, with fewer rows, does not, the group hangs. So decide `by group`, from rows that all ranks "
        "of the group know, or take a level whose region ends before the exchanges, such as `medium`.",
        wrong=f"{_MOE}   recompute all full adaptive(2.0) by rank",
        right=f"{_MOE}   recompute all full adaptive(2.0) by group",
    ),
    _code(
        "S151",
        "more hot experts than slots",
        "A rank keeps one slot for a hot expert beside each of its own experts. So there are at most as many hot "
        "experts as own experts. With 64 experts on 8 ranks, a rank has 8 slots.",
        wrong=f"{_MOE}   hot 9",
        right=f"{_MOE}   hot 8 until imbalance < 1.2",
    ),
    _code(
        "S152",
        "a capacity below one token, or buffers below the mean",
        "An expert takes tokens * top / experts * factor rows from each rank. Less than one row would drop nearly all "
        "tokens; rounding it up to one would hide the mistake. Buffers of `sizes bounded C` are at least of the mean "
        "number of rows: C is a number from 1 on.",
        wrong=f"{_MOE}   tokens 4   capacity 1.25 drop probs",
        right=f"{_MOE}   tokens 64   capacity 1.25 drop probs",
    ),
    _code(
        "S153",
        "impossible slices, or slices that change results",
        "`slices 2` runs a microbatch as 2 slices of its rows in each cell, of all stages; with `chunk 0`, `stage 3` "
        "or `stage [0, 3]`, of these. A microbatch has from 1 to 64 slices. The schedule must have these chunks and "
        "stages. Two lines for the same stages contradict each other, and `slices auto` stands alone. A `capacity` "
        "drops rows by those of a microbatch, and `hot ... by microbatch` chooses by them: both would choose otherwise "
        "for a slice. An order by hand names no slices.",
        wrong=f"{_MOE}   tokens 64   capacity 1.25   slices 2",
        right=f"{_MOE}   tokens 64   slices 2",
    ),
    _code(
        "S155",
        "an offload that cannot be read, or of nothing",
        "A line is `offload`, then `all`, `chunk 0`, `stage 3` or `stage [0, 3]`, perhaps with `keep 2`: the two "
        "newest microbatches stay on the device. With `offload auto` as few leave as the `memory` asks for. The plan "
        "says how much host memory a rank has, and how fast its lanes are: `host 200 GB at 50 GB/s`. Activations "
        "leave between forward and backward: where these follow each other at once, there is no place for it. The "
        "rank may not have more on the host than the plan says.",
        wrong="offload all",
        right="host 200 GB at 50 GB/s   offload all",
    ),
    _code(
        "S156",
        "devices that do not fit each other",
        "`parallel` says how a step is spread beside its pipeline: `tp 8` ranks split the products of a layer, `tp 8 "
        "of attention` those outside of experts. `cp 2` ranks split a sequence. `ep 32` ranks share the experts of a "
        "layer. `dp 48` ranks have their own part of the batch. `zero 0` to `zero 3` says what the dp ranks shard. A "
        "rank of the pipeline is then tp x cp x dp devices, in this order. Times the ranks of the schedule they are "
        "the `devices`, if the line says them. ep (times tp, where experts are split too) divides tp x cp x dp, and "
        "the experts. A `topology` has ep ranks, on the nodes where groups of neighbours lie, if the line says the "
        "devices of a `node`.",
        wrong="experts 64 top 8   parallel ep 8 dp 12",
        right="experts 64 top 8   parallel ep 8 dp 16",
    ),
    _code(
        "S157",
        "a batch that contradicts the microbatches",
        "`batch 4608 x 8192 by 1` is a step of 4608 sequences with 8192 tokens, one in a microbatch. It has as many "
        "sequences as the schedule's microbatches x `by` x the dp of `parallel`. The `tokens` of a microbatch on a "
        "rank are by x 8192, divided by the tp and cp ranks that share a sequence, and by segments.",
        wrong="parallel dp 4   batch 24 x 128",
        right="parallel dp 4   batch 16 x 128",
    ),
    _code(
        "S158",
        "rows that cannot be made even",
        "`balance by microbatch` copies experts to ranks that have room, so that all ranks compute as many rows. "
        "`within 1.02` lets a rank have so many times the mean. It needs exact sizes; `by step` does not. Copies "
        "stay inside nodes, or travel `over group`, which needs `alltoall flat`. A `capacity` and `hot` give ranks "
        "other rows. `balance auto` chooses by a record of the routing, and is by step without one. `slots 2` lets a "
        "rank hold two copies; rows without one stay at home. `migrate every 50 steps` moves experts between ranks. "
        "It needs ranks that share experts and may have other rows.",
        wrong=f"{_MOE}   balance by microbatch within 0.9 over group",
        right=f"{_MOE}   balance by microbatch within 1.02 over group",
    ),
)
