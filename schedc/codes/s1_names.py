"""Explains the codes of family S1: faults in the names, shapes and sizes of a schedule."""

from __future__ import annotations

from functools import partial

from schedc.codes.base import DiagnosticCode, edit_of

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
_code = partial(edit_of, _GOOD)


def _segmented(statement: str) -> str:
    """A file with microbatches in two segments, and this as its order."""
    return f"""sched 1
schedule a(P: ranks = 1, M: microbatches = 1, k: segments = 2) {{
  place linear
  rank r {{ {statement} }}
}}
"""


def _slots(ops: str, fill: str = "") -> str:
    """A file with these ops of microbatch m in a timed block. fill: what stands behind `timed`."""
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
        "Nothing above the name defines it. Names are sizes, `let`s, functions and loop variables; in claims, they "
        "are sizes, costs and metrics.",
        wrong="repeat m1",
        right="repeat M-1",
    ),
    _code(
        "S102",
        "name with two meanings",
        "A name has one meaning wherever it is visible: it is neither defined twice nor hidden by an inner "
        "definition. The functions of the language, the costs and the metrics are names, too.",
        wrong="let M = P-1-r",
        right="let w = P-1-r",
    ),
    _code(
        "S103",
        "roles of sizes",
        "Every size has a role: `ranks`, `microbatches`, `chunks`, `segments` or `count`. Exactly one size is the "
        "number of ranks, exactly one the number of microbatches, and at most one the number of segments.",
        wrong="M: count",
        right="M: microbatches",
    ),
    _code(
        "S104",
        "placement",
        "A schedule has one `place` line: `linear`, `loop(v)`, `v`, `waves(w)`, `map(S) { stage s on rank ... }`"
        " or `pipes { ... }` with two pipes.",
        wrong="place w",
        right="place v",
    ),
    _code(
        "S105",
        "rank block",
        "A schedule has exactly one `rank r { ... }` block, which describes all ranks by expressions of r, and at most"
        " one `order for` line.",
        wrong="  rank q { }\n  expect",
        right="  expect",
    ),
    _code(
        "S106",
        "wrong call",
        "A call has as many arguments as the function has parameters. A function may call only functions above it, so "
        "there is no recursion and every file ends.",
        wrong="fn last(k) = last(k - 1)",
        right="fn last(k) = k == P-1",
    ),
    _code(
        "S107",
        "not an integer value",
        "Expressions outside of claims are integers that are known when the schedule is compiled: no ops, costs,"
        " metrics, functions or decimals.",
        wrong="let w = bubble",
        right="let w = P-1-r",
    ),
    _code(
        "S108",
        "not a pair",
        "`X & Y` overlaps two ops of different microbatches: a forward with a B, I or W, or an I with a W.",
        wrong="F1 & F0",
        right="F1 & B0",
    ),
    _code(
        "S109",
        "malformed claim",
        "A claim compares metrics with numbers, sizes and costs. It holds for all ranks: `metric` is the largest "
        "value over the ranks, `metric[r]` the value of each rank r. Names of the rank block have no value in claims.",
        wrong="peak_activations <= w",
        right="peak_activations <= M",
    ),
    _code(
        "S110",
        "chunk missing or superfluous",
        "If a rank holds several chunks, then F, I, B, R and a W with `@` name one. Under `place linear` a rank holds "
        "one chunk, which is not written. The number after an op is never its microbatch.",
        wrong="{ F  F1 }",
        right="{ F0  F1 }",
    ),
    DiagnosticCode("S111", "unknown size", "The schedule does not have a size that was given (`-D name=value`)."),
    _code(
        "S112",
        "missing size",
        "A size has no default in the file and was not given (`-D name=value`).",
        wrong="M: microbatches",
        right="M: microbatches = 4",
    ),
    _code(
        "S113",
        "size out of bounds",
        "The limits are 1 to 4,096 ranks, 1 to 65,536 microbatches, 1 to 64 segments of each microbatch and 65,536 of "
        "all microbatches, and 1 to 16,384 chunks. A count is not negative.",
        wrong="M: microbatches = 70000",
        right="M: microbatches = 4",
    ),
    _code(
        "S114",
        "`require` does not hold",
        "The schedule is not made for these sizes. The help names the nearest sizes that work, one at a time.",
        wrong="M: microbatches = 1",
        right="M: microbatches = 4",
    ),
    _code(
        "S115",
        "negative repeat",
        "A `repeat` has a negative count, or a `for` ends before it begins, on some rank at these sizes. This is "
        "usually a slip that shows at small sizes, so the count is not silently replaced by 0.",
        wrong="repeat r-1",
        right="repeat M-1",
    ),
    _code(
        "S116",
        "arithmetic",
        "An expression divides by zero, a `/` leaves a remainder (`//` rounds down), or a value is beyond 2147483647.",
        wrong="let w = M/3",
        right="let w = P-1-r",
    ),
    _code(
        "S117",
        "no such chunk",
        "The number or expression after an op is a chunk of its rank. Chunks are numbered from 0 in the order of "
        "pipes, and in a pipe in the order of stages.",
        wrong="{ F0  F2 }",
        right="{ F0  F1 }",
    ),
    _code(
        "S118",
        "too many ops of a chunk",
        "An op would take a microbatch that does not exist. Each op takes the next microbatch of its chunk, unless "
        "`@` names one. Forwards and backwards are counted separately.",
        wrong="repeat M",
        right="repeat M-1",
    ),
    _code(
        "S119",
        "nothing pending",
        "W takes the oldest pending weight gradient: one that an I has left and no W has taken. If the W names a "
        "chunk, it is the oldest of this chunk, otherwise of the rank. Here none is pending.",
        wrong="W0  I0",
        right="I0  W0",
    ),
    _code(
        "S120",
        "schedule too large",
        "A schedule has at most 20,000,000 ops over all ranks, and its elaboration takes a bounded number of steps. "
        "This is checked before anything is expanded.",
        wrong="phase up   repeat 1000000 { repeat 1000000 { F0  F1 } }",
        right="phase up   { F0  F1 }",
    ),
    DiagnosticCode(
        "S121",
        "no such schedule",
        "Neither a schedule of the library nor a file has this name. Or a file with several schedules was named "
        "without choosing one: `file.sched:name`.",
    ),
    DiagnosticCode("S122", "file that cannot be read", "A file is missing, may not be read, or is not UTF-8 text."),
    _code(
        "S123",
        "stages that do not fit the ranks",
        "The placement has more than 16,384 stages, puts a stage on a rank that does not exist, or leaves a rank "
        "without a stage. Or it gives the pipes more or fewer microbatches than the schedule has.",
        wrong="place map(2*P) { stage s on rank s }",
        right="place v",
    ),
    _code(
        "S124",
        "order for too few microbatches",
        "`order for n` says that the order is written for n microbatches of each pipe. The ops of microbatches that "
        "do not exist are left out. n is at least the number of microbatches of a pipe, and at most twice the largest "
        "legal number.",
        wrong="place v  order for M - 1",
        right="place v",
    ),
    DiagnosticCode(
        "S125",
        "segments out of order",
        "If a size has the role `segments`, each microbatch is cut along its sequence. On every stage, the forward of "
        "a segment needs the forwards of the segments before it, because attention looks back. Its backward needs the "
        "backwards of the segments after it. Ops without `@` are numbered in this order.",
        wrong=_segmented("repeat M { F @ 1  F @ 0  B  B }"),
        right=_segmented("repeat M { F  F  B  B }"),
    ),
    _code(
        "S126",
        "misplaced computed order",
        "A rank block has at most one `timed` block or `policy`, in the block itself or as all of one phase. In a "
        "`timed` block every op has a slot, and the rank block has no ops beside it. In a `policy` with `prefer`, "
        "`cap` or `fill`, every op has a slot or none has one. Elsewhere no op has a slot. "
        "`fill W` places every W, `prefer` separates ops by `>`, and a cap is `<=` a number. A `search` has no other "
        "rules beside it. It orders the F, I and W of every microbatch on one stage per rank, and keeps 1 <= k of w. "
        "A policy is by `makespan` or `span`.",
        wrong="phase up   { F0 at 1  F1 }",
        right="phase up   { F0  F1 }",
    ),
    DiagnosticCode(
        "S127",
        "two ops in one slot",
        "In a `timed` block no rank has two ops at the same time. In a `timed pair` block two ops of one slot are a "
        "pair; a third op, or two that are no pair, are refused.",
        wrong=_slots("F at 3*m  B at 3*(m+1)"),
        right=_slots("F at 3*m  B at 3*m + 1"),
    ),
    DiagnosticCode(
        "S128",
        "computed order that comes to a stop",
        "Under the rule of a `fill` or a `policy`, all ranks wait at a limit. For example, a rank holds all "
        "activations that the limit allows, and the ops that free them need another activation first. Without the "
        "rule, in the order as written, the ops would run.",
        wrong=_slots("F at 3*m  I at 3*m + 1", "fill W within 0"),
        right=_slots("F at 3*m  I at 3*m + 1", "fill W within 1"),
    ),
    DiagnosticCode(
        "S129",
        "frozen order",
        "`schedc freeze` keeps the order that a `policy` chose as NAME.P4-M8.order beside its file. This order is "
        "then used instead of a new choice. It is refused if the .sched file has changed since, or if it is the order "
        "of another schedule. A schedule without a policy has nothing to freeze. To freeze one of the library, copy "
        "its file first.",
    ),
    DiagnosticCode(
        "S140",
        "a layout that cannot be read",
        "A layout has E (embedding), t (decoder layer), m (multi-token prediction), L (loss) and noop (padding), `|` "
        "between stages, brackets, and `*n` after a part or a bracket: `Et*3|(tt|)*29,m|L`. Commas and white space "
        "have no meaning. `|*3`, `t*0` and empty brackets are refused; an empty stage is `||`.",
    ),
    DiagnosticCode(
        "S141",
        "a layout too large",
        "A layout has at most 65,536 parts and stages, and 32 nested brackets. This is checked before anything is "
        "expanded, at the repetition that exceeds the limit.",
    ),
    DiagnosticCode(
        "S142",
        "parts of a layout in the wrong place",
        "The embedding is the first part of the first stage, and the loss the last part of the last stage. Between "
        "them come the decoder layers, then the multi-token predictions. Stages may be empty: `E||t|L`. Paddings may "
        "be anywhere. With predictions there may be a loss per output, each in a stage of its own: `Et|m|L|L`. The "
        "embedding of predictions may stand behind that of the model: `Eet|m|L`.",
    ),
    DiagnosticCode(
        "S143",
        "a layout that does not fit",
        "A layout has as many stages as the schedule at its sizes, and as many layers as the model. Layers and "
        "paddings together are a multiple of the number of stages. With multi-token predictions, the head has the "
        "last stage for itself, unless each output has a head. Heads per output are not priced inside cells. The "
        "message says which condition does not hold, and what would meet it.",
    ),
    DiagnosticCode(
        "S144",
        "a plan that says too little or too much",
        "A plan says exactly once where the layers are. It has a line `layers 61` with the options `dense`, `mtp` and "
        "`pad`, and with the places of paddings after `at` (last, first, auto, or a list); or it has a `layout` "
        "string. `costs`, `parameters`, `activations` and `memory` may each be given once.",
        wrong="plan a = 1f1b { layers 4  layers 5 }\n",
        right="plan a = 1f1b { layers 4 }\n",
    ),
)
