"""Explains the codes of family S2: which ops a schedule must have, on which rank, and in which order there."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode


def _file(body: str, place: str = "linear") -> str:
    return f"""sched 1
schedule example(P: ranks = 2, M: microbatches = 4) {{
  place {place}
  rank r {{
{body}
  }}
}}
"""


S2: tuple[DiagnosticCode, ...] = (
    DiagnosticCode(
        "S201",
        "an op names a stage or a microbatch that does not exist",
        "Stages and microbatches are numbered from 0. In a `.sched` file, S117 and S118 report this earlier. So the "
        "order was imported: it has `5F2` for five stages, 0 to 4, say, or more microbatches than it was imported "
        "for.",
    ),
    DiagnosticCode(
        "S202",
        "an op runs on a rank that does not hold its stage",
        "The placement says which rank holds which stage, for each pipe. The ops of a `.sched` file name chunks of "
        "their own rank. So the order was imported, perhaps with another placement than its own.",
    ),
    DiagnosticCode(
        "S203",
        "an op is missing",
        "Every microbatch has one forward and one backward on every stage. The backward is B, or I and later its W. "
        "The usual cause is a repeat count that is one too small at some sizes. The message names the first missing "
        "ops. It points at an op of the same microbatch that does run, or at the last op of this kind on the stage.",
        wrong=_file("    phase warmup repeat M - 1 { F }\n    phase drain repeat M { B }"),
        right=_file("    phase warmup repeat M { F }\n    phase drain repeat M { B }"),
    ),
    DiagnosticCode(
        "S204",
        "an op runs before an op that it needs",
        "On a rank, the backward of a microbatch comes after its forward, W after its I, and an R between forward and "
        "backward. If a rank holds two neighbouring stages, the forward of the later stage comes after that of the "
        "earlier stage, and the backwards in reverse. The two ops of a pair run at the same time, so neither may need "
        "the other.",
        wrong=_file("    phase steady repeat M { B  F }"),
        right=_file("    phase steady repeat M { F  B }"),
    ),
    DiagnosticCode(
        "S205",
        "an op runs twice",
        "Each op runs once. On a stage, a microbatch has one backward (B, or I and W, but not B and I) and at most "
        "one R. Ops without `@` take the next microbatch, so the usual cause is an explicit microbatch.",
        wrong=_file("    phase warmup repeat M { F }\n    phase drain for k in 0 ..< M + 1 { B @ k % M }"),
        right=_file("    phase warmup repeat M { F }\n    phase drain for k in 0 ..< M { B @ k % M }"),
    ),
    DiagnosticCode(
        "S206",
        "two ops that do not pair",
        "An overlapped pair hides the communication of one op behind the compute of the other. It is a forward and "
        "then a backward, `F & B` or `F & I`, or an op with the weight gradients of an older microbatch, `F & W` or "
        "`I & W`. In a `.sched` file, S108 reports this earlier, so the order was imported.",
    ),
    DiagnosticCode(
        "S207",
        "a weight gradient without a split backward",
        "W computes the weight gradients that I left pending. B computes them itself, so a W after B is one too many. "
        "In a `.sched` file a W takes the oldest pending I, and S119 reports a W without one. So the order was "
        "imported.",
    ),
    DiagnosticCode(
        "S208",
        "a paired weight gradient before its input gradient",
        "In `F & W` and `I & W` the weight gradients of an older microbatch fill the time in which the other op waits "
        "for its exchanges. Their input gradient must have run before the pair: the W cannot be that of the F or the I "
        "beside it. Put the W off until the next F or I.",
        wrong=_file("    phase warmup repeat M { F }\n    phase steady repeat M { I & W }"),
        right=_file(
            "    phase warmup repeat M { F }\n    phase first { I }\n    phase steady repeat M - 1 { I & W }\n"
            "    phase last { W }"
        ),
    ),
)
