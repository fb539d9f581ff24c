"""A schedule with `F & W` or `I & W` in its steady phase, for tests."""

from __future__ import annotations

from schedc.compiler import legal_schedule
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.syntax.parser import parse

_TEXT = """sched 1
schedule example(P: ranks = 2, M: microbatches = 4) {
  place linear
  rank r {
    phase warmup { F  I }
    phase steady repeat M - 1 { %s }
    phase flush { W }
  }
}
"""
STEADY = {"FW": "F & W  I", "WF": "W & F  I", "IW": "F  I & W"}
"""By pair, in the order in which it is written: the steady phase."""


def schedule_of_pairs(pair: str, P: int = 2, M: int = 4) -> Schedule:
    return legal_schedule(parse(Source("example.sched", _TEXT % STEADY[pair])).schedules[0], {"P": P, "M": M})
