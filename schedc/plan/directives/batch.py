"""``batch 4608 x 8192 by 1``: the sequences of a step, their tokens, and the sequences of a microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.diagnostics import Diagnostic
from schedc.ir.parallel import GlobalBatch, Parallel
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.plan.directives.base import Directive, Directives, Reading
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import BatchLine, Word


def _read(reading: Reading, line: BatchLine) -> None:
    good = reading.word(line.times, ("x",), "part of a batch")
    if line.by is not None:
        good &= reading.word(Word(line.by.name, line.by.span), ("by",), "part of a batch")
    if good:
        reading.give(batch=GlobalBatch(line.sequences, line.tokens, int(line.by.value) if line.by else 1))


def _write(plan: Plan) -> Iterator[str]:
    if (batch := plan.batch) is not None:
        yield f"batch {batch.sequences} x {batch.tokens} by {batch.by}"


def _check_schedule(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S157: sequences or tokens that are not those of the schedule's microbatches."""
    plan = directives.plan
    if (batch := plan.batch) is None:
        return
    parts = schedule.sizes.get(directives.segments, 1)
    microbatches = schedule.microbatches // parts
    fault = _sequence_fault(batch, plan.parallel, microbatches) or _token_fault(batch, plan, parts)
    if fault is not None:
        yield directives.fault("batch", "S157", *fault)


def _sequence_fault(batch: GlobalBatch, parallel: Parallel | None, microbatches: int) -> tuple[str, str] | None:
    """(message, help) where the sequences are not microbatches x dp x by; without dp, where no dp would do."""
    shape = f"{microbatches} microbatches x {batch.by}"
    if parallel is None:
        if batch.sequences % (microbatches * batch.by) == 0:
            return None
        help = f"give a multiple of {microbatches * batch.by:,} sequences, or change the schedule's microbatches"
        return f"{batch.sequences:,} sequences in {shape} on each replica", help
    step = parallel.dp * batch.by
    if batch.sequences == microbatches * step:
        return None
    help = f"write {microbatches * step:,} sequences"
    if batch.sequences % step == 0:
        help = f"give the schedule {batch.sequences // step:,} microbatches, or {help}"
    return f"{batch.sequences:,} sequences, and {shape} x dp {parallel.dp} = {microbatches * step:,}", help


def _token_fault(batch: GlobalBatch, plan: Plan, parts: int) -> tuple[str, str] | None:
    """(message, help) where ``tokens`` is not a microbatch's share of a rank. parts: segments of a microbatch."""
    split = plan.parallel or Parallel()
    tokens, rest = divmod(batch.by * batch.tokens, split.tp * split.cp * parts)
    if not plan.tokens or (plan.tokens == tokens and not rest):
        return None
    shares = [
        f"{name} {count}" for name, count in (("tp", split.tp), ("cp", split.cp), ("segments", parts)) if count > 1
    ]
    over = f" over {' x '.join(shares)}" * bool(shares)
    message = f"`tokens {plan.tokens}`, and a microbatch of {batch.by} x {batch.tokens} tokens{over}"
    return message, f"a rank has its share of a microbatch's tokens: write `tokens {tokens}`"


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """step_tokens: tokens of a step."""
    if (batch := plan.batch) is None:
        return {}
    values = {"sequences": batch.sequences, "tokens": batch.tokens, "by": batch.by}
    return {"batch": {**values, "step_tokens": batch.sequences * batch.tokens}}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (said := facts.get("batch")) is not None:
        step = f"{said['step_tokens']:,} tokens of a step"
        yield f"batch {said['sequences']} x {said['tokens']} by {said['by']}: {step}"


DIRECTIVE = Directive(
    "batch",
    _read,
    _write,
    check_schedule=_check_schedule,
    facts=_facts,
    text=_text,
)
