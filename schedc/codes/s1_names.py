"""Codes of family S1: names, shapes and sizes of a schedule."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode

_GOOD = """sched 1
schedule a(P: ranks = 1, M: microbatches = 4) {
  require M >= 2*P
  place v
  fn last(k) = k == P-1
  rank r {
    let w = P-1-r
    phase up   { F0  F1 }
    phase over repeat M-1 { F0 & B1  F1 & B0 }
    phase down { B1  I0  W0 }
  }
  expect peak_activations <= M
}
"""


def _code(code: str, title: str, explanation: str, right: str, wrong: str) -> DiagnosticCode:
    """A code whose example is the good file with ``right`` replaced by ``wrong``."""
    assert right in _GOOD, f"the example of {code} does not fit the file"
    return DiagnosticCode(code, title, explanation, _GOOD.replace(right, wrong, 1), _GOOD)


def _segmented(statement: str) -> str:
    """A file with microbatches in two segments, and this as its order."""
    return f"""sched 1
schedule a(P: ranks = 1, M: microbatches = 1, k: segments = 2) {{
  place linear
  rank r {{ {statement} }}
}}
"""


def _slots(ops: str, fill: str = "") -> str:
    """A file with these ops of microbatch m in a timed block."""
    return f"""sched 1
schedule a(P: ranks = 1, M: microbatches = 2) {{
  place linear
  rank r {{ timed {fill} {{ for m in 0 ..< M {{ {ops} }} }} }}
}}
"""


S1: tuple[DiagnosticCode, ...] = (
    _code(
        "S101",
        "unknown name",
        "A name that nothing above it gives a meaning. Names are sizes, `let`s, functions and loop variables; in claims"
        " sizes, costs and metrics.",
        "repeat M-1",
        "repeat m1",
    ),
    _code(
        "S102",
        "name with two meanings",
        "A name has one meaning wherever it is visible: it is neither defined twice nor hidden by an inner one. The"
        " functions of the language, the costs and the metrics are names too.",
        "let w = P-1-r",
        "let M = P-1-r",
    ),
    _code(
        "S103",
        "roles of sizes",
        "Every size has a role: `ranks`, `microbatches`, `chunks`, `segments` or `count`. Exactly one is the"
        " number of ranks, exactly one that of microbatches, and at most one that of segments.",
        "M: microbatches",
        "M: count",
    ),
    _code(
        "S104",
        "placement",
        "A schedule has one `place` line: `linear`, `loop(v)`, `v`, `waves(w)`, `map(S) { stage s on rank ... }`"
        " or `pipes { ... }` with two pipes.",
        "place v",
        "place w",
    ),
    _code(
        "S105",
        "rank block",
        "A schedule has exactly one `rank r { ... }` block, which describes all ranks by expressions of r, and at most"
        " one `order for` line.",
        "  expect",
        "  rank q { }\n  expect",
    ),
    _code(
        "S106",
        "wrong call",
        "A function takes as many arguments as it has parameters, and may call only functions above it, so that nothing"
        " recurs and every file ends.",
        "fn last(k) = k == P-1",
        "fn last(k) = last(k - 1)",
    ),
    _code(
        "S107",
        "not an integer value",
        "Expressions outside of claims are integers that are known when the schedule is compiled: no ops, costs,"
        " metrics, functions or decimals.",
        "let w = P-1-r",
        "let w = bubble",
    ),
    _code(
        "S108",
        "not a pair",
        "`X & Y` overlaps one forward with one backward (B or I) of another microbatch.",
        "F1 & B0",
        "F1 & W0",
    ),
    _code(
        "S109",
        "malformed claim",
        "A claim compares metrics with numbers, sizes and costs. It holds for all ranks: `metric` is the largest over"
        " them, `metric[r]` that of each rank r. What only the rank block knows has no value there.",
        "peak_activations <= M",
        "peak_activations <= w",
    ),
    _code(
        "S110",
        "chunk missing or superfluous",
        "Where a rank holds several chunks, F, I, B, R and a W with `@` say which. Under `place linear` a rank holds"
        " one, and it is not written: the number after an op is never its microbatch.",
        "{ F0  F1 }",
        "{ F  F1 }",
    ),
    DiagnosticCode("S111", "unknown size", "A size was given (`-D name=value`) that the schedule does not have."),
    _code(
        "S112",
        "missing size",
        "A size has no default in the file and was not given (`-D name=value`).",
        "M: microbatches = 4",
        "M: microbatches",
    ),
    _code(
        "S113",
        "size out of bounds",
        "There are 1 to 4,096 ranks, 1 to 65,536 microbatches or segments of them, 1 to 64 segments of each, and 1"
        " to 16,384 chunks; a count is not negative.",
        "M: microbatches = 4",
        "M: microbatches = 70000",
    ),
    _code(
        "S114",
        "`require` does not hold",
        "The schedule is not made for these sizes. The help names the nearest sizes that work, one at a time.",
        "M: microbatches = 4",
        "M: microbatches = 1",
    ),
    _code(
        "S115",
        "negative repeat",
        "A `repeat` has a negative count, or a `for` ends before it begins, on some rank at these sizes. That is"
        " usually a slip at small sizes, so that nothing is clipped silently.",
        "repeat M-1",
        "repeat r-1",
    ),
    _code(
        "S116",
        "arithmetic",
        "A division by zero, a `/` that leaves a remainder (`//` rounds down), or a value beyond 2147483647.",
        "let w = P-1-r",
        "let w = M/3",
    ),
    _code(
        "S117",
        "no such chunk",
        "The number or expression after an op is the chunk of its rank, counted from 0: first by pipe, then by stage.",
        "{ F0  F1 }",
        "{ F0  F2 }",
    ),
    _code(
        "S118",
        "too many ops of a chunk",
        "An op would take a microbatch that does not exist. Each op takes the next one of its chunk unless `@` names"
        " it; forwards and backwards count apart.",
        "repeat M-1",
        "repeat M",
    ),
    _code(
        "S119",
        "nothing pending",
        "W takes the oldest weight gradient that an I has left and no W has taken: of its chunk where one is named,"
        " else of the rank. Here there is none.",
        "I0  W0",
        "W0  I0",
    ),
    _code(
        "S120",
        "schedule too large",
        "A schedule has at most 20,000,000 ops over all ranks, and a bounded number of steps to elaborate it. This is"
        " computed before anything is expanded.",
        "phase up   { F0  F1 }",
        "phase up   repeat 1000000 { repeat 1000000 { F0  F1 } }",
    ),
    DiagnosticCode(
        "S121",
        "no such schedule",
        "The library has no schedule of that name and there is no such file, or a file with several schedules was named"
        " without choosing one: `file.sched:name`.",
    ),
    DiagnosticCode("S122", "file that cannot be read", "A file is missing, may not be read, or is not UTF-8 text."),
    _code(
        "S123",
        "stages that do not fit the ranks",
        "The placement gives more stages than the limit of 16,384, puts a stage on a rank that does not exist, leaves a"
        " rank without a stage, or shares out the microbatches wrongly between the pipes.",
        "place v",
        "place map(2*P) { stage s on rank s }",
    ),
    _code(
        "S124",
        "order for too few microbatches",
        "`order for n` says that the order is written for n microbatches of each pipe, and leaves out the ops of those"
        " that do not exist. n is at least the number that there are, and at most twice the largest legal one.",
        "place v",
        "place v  order for M - 1",
    ),
    DiagnosticCode(
        "S125",
        "segments out of order",
        "Where a size has the role `segments`, each microbatch is cut along its sequence. On every stage the forward of"
        " a segment needs those before it, and its backward those behind it: attention looks back. Ops without `@` are"
        " numbered so.",
        wrong=_segmented("repeat M { F @ 1  F @ 0  B  B }"),
        right=_segmented("repeat M { F  F  B  B }"),
    ),
    _code(
        "S126",
        "misplaced computed order",
        "A rank block has at most one `timed` block or `policy`, in the block itself or as the whole of a phase. In a"
        " `timed` block every op has a slot, and nothing stands beside it; elsewhere no op has one. `fill W` places"
        " every W, `prefer` separates ops by `>`, and a cap is `<=` a number. A `search` stands alone, orders the F, I"
        " and W of every microbatch on one stage per rank, and keeps 1 <= k of w; a policy is by `makespan` or `span`.",
        "phase up   { F0  F1 }",
        "phase up   { F0 at 1  F1 }",
    ),
    DiagnosticCode(
        "S127",
        "two ops in one slot",
        "In a `timed` block no rank has two ops at the same time.",
        wrong=_slots("F at 3*m  B at 3*(m+1)"),
        right=_slots("F at 3*m  B at 3*m + 1"),
    ),
    DiagnosticCode(
        "S128",
        "computed order that comes to a stop",
        "Under the rule of a `fill` or a `policy` all ranks wait, for a limit that nothing can lower: activations that"
        " are only freed by ops for which there is no room, say. The order as written would run.",
        wrong=_slots("F at 3*m  I at 3*m + 1", "fill W within 0"),
        right=_slots("F at 3*m  I at 3*m + 1", "fill W within 1"),
    ),
    DiagnosticCode(
        "S129",
        "frozen order",
        "`schedc freeze` keeps the order that a `policy` chose as NAME.P4-M8.order beside its file, and it is then"
        " used instead of ordering anew. It is refused where the .sched file has changed since, or where it is an order"
        " of something else. There is nothing to freeze in a schedule without a policy, or in one of the library: copy"
        " the file first.",
    ),
    DiagnosticCode(
        "S140",
        "a layout that cannot be read",
        "A layout has E (embedding), t (decoder layer), m (multi-token prediction), L (loss) and noop (padding), `|`"
        " between stages, brackets, and `*n` after a part or a bracket: `Et*3|(tt|)*29,m|L`. Commas and white space"
        " mean nothing. `|*3`, `t*0` and empty brackets are refused: an empty stage is `||`.",
    ),
    DiagnosticCode(
        "S141",
        "a layout too large",
        "A layout has at most 65,536 parts and stages, and 32 brackets inside each other. This is seen before anything"
        " is expanded, at the repetition that goes too far.",
    ),
    DiagnosticCode(
        "S142",
        "parts of a layout in the wrong place",
        "The embedding is the first part of the first stage and the loss the last of the last one; the decoder layers"
        " come first, then the multi-token predictions. Stages may be empty: `E||t|L`. Paddings may stand anywhere.",
    ),
    DiagnosticCode(
        "S143",
        "a layout that does not fit",
        "A layout has as many stages as the schedule has at its sizes, and as many layers as the model. Layers and"
        " paddings together divide by the number of stages. Where there are multi-token predictions, the head has the"
        " last stage for itself. The message says which of these does not hold, and what would.",
    ),
    DiagnosticCode(
        "S144",
        "a plan that says too little or too much",
        "A plan says once where the layers are: `layers 61` with the options `dense`, `mtp` and `pad`, and the places"
        " of paddings behind `at` (last, first, auto, or a list), or a `layout` string. `costs`, `parameters`,"
        " `activations` and `memory` may each stand once beside it.",
        wrong="plan a = 1f1b { layers 4  layers 5 }\n",
        right="plan a = 1f1b { layers 4 }\n",
    ),
)
