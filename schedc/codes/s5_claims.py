"""Explains the codes of family S5: claims (`expect`) that do not hold or cannot be checked."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode


def _file(claim: str) -> str:
    return f"""sched 1
schedule example(P: ranks = 3, M: microbatches = 6) {{
  place linear
  rank r {{
    phase warmup repeat M {{ F }}
    phase drain  repeat M {{ B }}
  }}
  expect {claim}
}}
"""


S5: tuple[DiagnosticCode, ...] = (
    DiagnosticCode(
        "S501",
        "a claim does not hold",
        "A claim holds for all costs at the given sizes. Every cost is above 0 but p2p, which is at least 0 (0 if the "
        "claim does not name it). FB is between max(F, B) and F + B, and B = I + W if the order has an I. The "
        "counterexample is simulated and shown with both sides of the claim. Most published formulas hold only under a "
        "condition: state it with `when`. `bubble` is the idle time from the start of the step to its end, "
        "`span_bubble` from a rank's first op to its last.",
        wrong=_file("bubble == (P-1)*F"),
        right=_file("bubble == (P-1)*(F+B)"),
    ),
    DiagnosticCode(
        "S502",
        "a claim without a value",
        "At these sizes the claim divides by zero, or its value is too large to compute. The caret is under the part "
        "that has no value.",
        wrong=_file("bubble == (P-1)*(F+B)/(P-3)"),
        right=_file("bubble == (P-1)*(F+B)/(P-2)"),
    ),
    DiagnosticCode(
        "S503",
        "too few sizes to derive formulas from",
        "`schedc report` fits its formulas to a dozen or more legal sizes of 2 to 10 ranks, with up to about four "
        "microbatches per rank. It verifies them at others. If the `require` lines of a schedule allow fewer sizes, "
        "it has figures (`schedc check`), but no formulas.",
    ),
    DiagnosticCode(
        "S511",
        "not a range of sizes",
        "`--sweep` takes comparisons of the schedule's sizes, separated by commas or `and`: `P<=16, M<=4*P`. Every "
        "size in it needs an upper bound in numbers and other sizes. Its least value is 1 if no comparison says "
        "otherwise. Comparisons that are no bounds filter the sizes: `M % P == 0`. Sizes that are not named keep `-D` "
        "or their default.",
    ),
    DiagnosticCode(
        "S512",
        "too many sizes",
        "A range has at most 1,000,000 sizes, because everything is checked at each of them.",
    ),
    DiagnosticCode(
        "S513",
        "orders without a rule",
        "`schedc tune --rule` found no text for these orders, or none that it may print. A text must give every order "
        "that was held out, or be as fast as every given order. And each of its claims must be proved at every size of "
        "its range. Orders need a placement in common, one of those that are recognized, and three sizes or more. "
        "Where `--time` ended before all texts were tried, the message says so.",
    ),
)
