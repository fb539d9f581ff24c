"""Explains the codes of family S0: faults in the form of a file."""

from __future__ import annotations

from functools import partial

from schedc.codes.base import DiagnosticCode, edit_of

_GOOD = """sched 1
schedule a(P: ranks = 2, M: microbatches = 2) {
  place linear
  rank r {
    phase all repeat M { F  B }
  }
}
"""
_code = partial(edit_of, _GOOD)


S0: tuple[DiagnosticCode, ...] = (
    _code(
        "S001",
        "unexpected word or sign",
        "The text has a form that the language does not know. The message says what is legal at the caret and what "
        "was found instead. Parsing goes on at the next statement, so one run shows several errors. "
        "docs/guide/language.md shows the form of every construct.",
        wrong="repat M {",
        right="repeat M {",
    ),
    _code(
        "S002",
        "unexpected character",
        "No part of the language uses this character. Statements need no separator. The only string is that of a "
        "plan's `layout`. `and`, `or` and `not` are words.",
        wrong="F; B",
        right="F  B",
    ),
    _code(
        "S003",
        "bracket without a partner",
        "A bracket is never closed, closes nothing, or closes another kind of bracket. For a brace that is never "
        "closed, the indentation of the file shows which one was probably forgotten.",
        wrong="{ F  B\n",
        right="{ F  B }\n",
    ),
    _code(
        "S004",
        "file beyond the limits",
        "A file has at most 1 MiB and 200,000 tokens, 64 levels of nesting and 200 operators in one expression. The "
        "limits are checked before parsing, so no file can exhaust the compiler.",
        wrong="repeat " + "(" * 70 + "M" + ")" * 70,
        right="repeat M",
    ),
    _code(
        "S005",
        "number too large",
        "Numbers go up to 2147483647, in the text and in every step of a computation.",
        wrong="M: microbatches = 20000000000",
        right="M: microbatches = 2",
    ),
    _code(
        "S006",
        "not a legal name",
        "A name begins with a letter or `_`, goes on with letters, digits and `_`, and has at most 64 characters. F, I,"
        " W, B and R, alone or with digits after them, are ops and never names. A schedule's own name may begin with a"
        " digit (`1f1b`).",
        wrong="place linear\n  let F0 = 2\n",
        right="place linear\n",
    ),
    _code(
        "S007",
        "unknown edition",
        "The first line names the edition of the language in which the file is written. This compiler knows edition "
        "1. A file without such a line is of edition 1, too.",
        wrong="sched 2",
        right="sched 1",
    ),
    DiagnosticCode(
        "S009", "no schedule in the file", "A file holds one or more schedules.", wrong="sched 1\n", right=_GOOD
    ),
)
