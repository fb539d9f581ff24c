"""Codes of family S1 about what a plan attaches: experts, exchanges, cells, hot experts, capacity, recomputation."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode


def _plan(lines: str, schedule: str = "1f1b(P = 2, M = 4)") -> str:
    return f"plan a = {schedule} {{\n  layers 4\n  {lines}\n}}\n"


def _code(code: str, title: str, explanation: str, wrong: str, right: str) -> DiagnosticCode:
    return DiagnosticCode(code, title, explanation, _plan(wrong), _plan(right))


_MOE = "experts 64 top 8 width 64 hidden 256   topology nodes 2 x 4"

S1_PLANS: tuple[DiagnosticCode, ...] = (
    _code(
        "S145",
        "numbers of experts that do not fit",
        "A token takes the `top` k of the experts, from 1 to all of them; with `groups g limit n` those of n of g equal"
        " groups, which hold at least k. Every rank of the `topology` holds equally many experts. A plan with experts"
        " has a layer that is not dense.",
        "experts 64 top 8 groups 8 limit 0",
        "experts 64 top 8 groups 8 limit 4",
    ),
    _code(
        "S146",
        "a quantity of a plan that means nothing",
        "Speeds are `50 GB/s`, `400 Gbit/s`, `10 GiB/s`; memory is in KB to TB or KiB to TiB, or has no unit in all of"
        " the plan. Where it is in bytes, what every kind of layer holds must be said by `activations`, or follow, of"
        " MoE layers, from `experts ... width F hidden H` and `tokens`; with `recompute ... adaptive(s)` these and the"
        " `topology` say how many rows may come. Nodes, ranks and tokens are numbers from 1,"
        " and so is an imbalance: the fullest rank's rows over the mean.",
        "experts 64 top 8   topology nodes 2 x 4 rail 50",
        "experts 64 top 8   topology nodes 2 x 4 rail 50 GB/s",
    ),
    DiagnosticCode(
        "S147",
        "an order of a cell that cannot be read, or that nothing follows",
        "`cell F & B` or `cell F & I` gives each lane its steps: in `compute` F.role, B.role.I or B.role.W with the"
        " roles attention, permute, relay, experts, relay_back, shared and post; in `comm` F.role or B.role with"
        " routing, dispatch, combine, hot and balance. `attn` and `mlp` are attention and experts. A step stands once;"
        " those that are left out go where they fit. The order is one of pairs that the schedule has.",
        _plan("cell F & B { compute F.atention }", "dualpipev(P = 2, M = 8)"),
        _plan("cell F & B { compute F.attention }", "dualpipev(P = 2, M = 8)"),
    ),
    DiagnosticCode(
        "S148",
        "padding on a stage that a pair needs",
        "A pair is overlapped so that what one half waits for hides behind what the other computes. In a stage that"
        " holds nothing but paddings there is nothing to compute: put a layer there, or do not ask for `overlap`.",
        _plan("overlap auto", "dualpipev(P = 2, M = 8)").replace("layers 4", "layers 3 pad 1 at [1]"),
        _plan("overlap auto", "dualpipev(P = 2, M = 8)"),
    ),
    _code(
        "S149",
        "a recomputation that cannot be read, or of nothing",
        "A line is `recompute`, then `all`, `chunk 0`, `stage 3` or `stage [0, 3]`, then a level (none, norm, act,"
        " light, medium, full), then perhaps `adaptive(s)` with `by rank` or `by group`, or `in bubbles`. Chunks and"
        " stages are those that the schedule has at its sizes. A stage's own line goes before one for its chunk, and"
        " that before one for all; two lines for one thing contradict each other. A stage that the schedule has Rs of"
        " is not said to recompute `none`.",
        "recompute chunk 1 light",
        "recompute chunk 0 light",
    ),
    _code(
        "S150",
        "a recomputed region with a collective, decided by each rank",
        "The level `full` dispatches and combines again in backward. These are collectives: if one rank starts them and"
        " another, with fewer rows, does not, the group hangs. So it is decided `by group`, from rows that all of its"
        " ranks know, or the region ends before the exchanges, as in `medium`.",
        f"{_MOE}   recompute all full adaptive(2.0) by rank",
        f"{_MOE}   recompute all full adaptive(2.0) by group",
    ),
    _code(
        "S151",
        "more hot experts than slots",
        "A rank keeps a slot for a hot expert beside each expert of its own: a hot set is not larger than that. With 64"
        " experts on 8 ranks there are 8 slots.",
        f"{_MOE}   hot 9",
        f"{_MOE}   hot 8 until imbalance < 1.2",
    ),
    _code(
        "S152",
        "a capacity below one token",
        "An expert takes tokens * top / experts * factor rows from each rank. Less than one row would drop nearly all"
        " tokens, and rounding it up would hide that.",
        f"{_MOE}   tokens 4   capacity 1.25 drop probs",
        f"{_MOE}   tokens 64   capacity 1.25 drop probs",
    ),
)
