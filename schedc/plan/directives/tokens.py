"""``tokens 4096 dtype bf16``: the tokens of a microbatch on a rank, and the type of their numbers."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.ir.plan import BYTES, Plan
from schedc.plan.directives.base import Directive, Reading
from schedc.syntax.plan import TokensLine


def _read(reading: Reading, line: TokensLine) -> None:
    if line.count < 1:
        reading.fault("S146", "no tokens", line.span, "say how many a rank has in one microbatch")
        return
    reading.give(tokens=line.count)
    if line.words:
        option, dtype = line.words
        if reading.word(option, ("dtype",), "fact of the tokens") and reading.word(dtype, BYTES, "type of number"):
            reading.give(dtype=dtype.text)


def _write(plan: Plan) -> Iterator[str]:
    if plan.tokens:
        yield f"tokens {plan.tokens}" + (f" dtype {plan.dtype}" if plan.dtype else "")


DIRECTIVE = Directive("tokens", _read, _write)
