"""Codes of family S2: which ops a schedule must have, where, and in which order on a rank."""

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
        "Stages and microbatches count from 0. In a `.sched` file this is already found while the order is built "
        "(S117, S118), so that it comes from an imported order: `5F2` where there are five stages, 0 to 4, or for "
        "fewer microbatches than the order has.",
    ),
    DiagnosticCode(
        "S202",
        "an op runs on a rank that does not hold its stage",
        "The placement says which rank holds which stage, for each pipe. The ops of a `.sched` file name chunks of "
        "their own rank, so that this comes from an imported order, or from one imported with another placement "
        "than it was made for.",
    ),
    DiagnosticCode(
        "S203",
        "an op is missing",
        "Every microbatch has, on every stage, one forward and one backward: B, or I and later its W. Mostly a "
        "repeat count is one too small at some sizes. The message names the first that are missing and points at "
        "what there is: the op of the same microbatch that does run, or the last op of that kind on the stage.",
        wrong=_file("    phase warmup repeat M - 1 { F }\n    phase drain repeat M { B }"),
        right=_file("    phase warmup repeat M { F }\n    phase drain repeat M { B }"),
    ),
    DiagnosticCode(
        "S204",
        "an op runs before one whose result it takes",
        "On a rank, the backward of a microbatch comes after its forward, W after its I, and R, where there is one, "
        "between the forward and the backward. Where a rank holds two neighbouring stages, the later one's forward "
        "comes after the earlier one's, and the backwards the other way round. The two ops of a pair run at the same "
        "time, so that neither may need the other.",
        wrong=_file("    phase steady repeat M { B  F }"),
        right=_file("    phase steady repeat M { F  B }"),
    ),
    DiagnosticCode(
        "S205",
        "an op runs twice",
        "Each op runs once. A microbatch has one backward on a stage: B, or I and W, but not B and I, and at most one "
        "R. Ops without `@` count up by themselves; an explicit microbatch is the usual cause.",
        wrong=_file("    phase warmup repeat M { F }\n    phase drain for k in 0 ..< M + 1 { B @ k % M }"),
        right=_file("    phase warmup repeat M { F }\n    phase drain for k in 0 ..< M { B @ k % M }"),
    ),
    DiagnosticCode(
        "S206",
        "a pair is not a forward and a backward",
        "An overlapped pair hides the communication of one direction behind the compute of the other: it is a "
        "forward and then a backward, `F & B` or `F & I`. In a `.sched` file S108 says so before; this comes from an "
        "imported order.",
    ),
    DiagnosticCode(
        "S207",
        "a weight gradient without a split backward",
        "W computes the weight gradients that I left pending. B has computed them already, so that W after B is "
        "one too many. In a `.sched` file a W takes the oldest pending I, and S119 says where there is none; this "
        "comes from an imported order.",
    ),
)
