"""``parallel tp 8 of attention cp 1 ep 32 dp 48 zero 1``: how a step is spread over devices beside its pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from schedc.diagnostics import Diagnostic
from schedc.ir.contradictions import MOST_ZERO
from schedc.ir.parallel import OF_ATTENTION, Parallel
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.plan.directives.base import Directive, Directives, Reading
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import GivenValue, ParallelLine, Word, WordPair

_NAMES = ("tp", "cp", "ep", "dp", "zero", "devices", "node")
_DEFAULTS = {field.name: field.default for field in fields(Parallel)}


def _read(reading: Reading, line: ParallelLine) -> None:
    values: dict[str, Any] = {}
    before = ""
    for part in line.parts:
        if isinstance(part, WordPair):
            if not _read_of(reading, part, before):
                return
            values["of"] = OF_ATTENTION
        elif not _read_number(reading, part, values):
            return
        before = part.name if isinstance(part, GivenValue) else ""
    reading.give(parallel=Parallel(**values))


def _read_of(reading: Reading, pair: WordPair, before: str) -> bool:
    """``of attention``, which stands behind the tensor parallel ranks."""
    if not reading.word(pair.first, ("of",), "part of a parallel line"):
        return False
    if before != "tp":
        reading.fault("S156", "`of attention` does not follow `tp`", pair.span, "write `tp 8 of attention`")
        return False
    return reading.word(pair.second, (OF_ATTENTION,), "part of a model")


def _read_number(reading: Reading, part: GivenValue, values: dict[str, Any]) -> bool:
    if not reading.word(Word(part.name, part.span), _NAMES, "part of a parallel line"):
        return False
    if part.name in values:
        reading.fault("S144", f"`{part.name}` is said twice", part.span, "keep one of the two")
        return False
    if part.name == "zero" and part.value > MOST_ZERO:
        help = "0 shards nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too"
        reading.fault("S156", f"no stage {part.value} of ZeRO", part.span, help)
        return False
    if part.name != "zero" and part.value < 1:
        reading.fault("S156", f"`{part.name} {part.value}`", part.span, "numbers of ranks begin at 1")
        return False
    values[part.name] = int(part.value)
    return True


def _write(plan: Plan) -> Iterator[str]:
    if (parallel := plan.parallel) is not None:
        said = [f"tp {parallel.tp}" + f" of {parallel.of}" * bool(parallel.of)]
        for name in _NAMES[1:]:
            value = getattr(parallel, name)
            said += [f"{name} {value}"] * (value != _DEFAULTS[name])
        yield f"parallel {' '.join(said)}"


def _check_schedule(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S156: the devices are not those of a pipeline rank times the ranks of the schedule."""
    parallel = directives.plan.parallel
    if parallel is None or parallel.devices in (0, parallel.per_rank * schedule.ranks):
        return
    product = f"tp {parallel.tp} x cp {parallel.cp} x dp {parallel.dp} x {schedule.ranks} ranks"
    message = f"{parallel.devices:,} devices, and {product} = {parallel.per_rank * schedule.ranks:,}"
    help = "change `dp`, or the ranks of the schedule"
    if parallel.devices % (rest := parallel.tp * parallel.cp * schedule.ranks) == 0:
        help = f"with {schedule.ranks} ranks write `dp {parallel.devices // rest}`"
    yield directives.fault("parallel", "S156", message, help)


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """per_rank: devices of one pipeline rank. expert_replicas: how often these hold each expert."""
    if (parallel := plan.parallel) is None:
        return {}
    values = {name: getattr(parallel, name) for name in ("tp", "of", "cp", "ep", "dp", "zero")}
    replicas = parallel.per_rank // parallel.expert_group
    return {"parallel": {**values, "per_rank": parallel.per_rank, "expert_replicas": replicas}}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (said := facts.get("parallel")) is not None:
        of = f" of {said['of']}" * bool(said["of"])
        axes = f"parallel tp {said['tp']}{of} cp {said['cp']} ep {said['ep']} dp {said['dp']} zero {said['zero']}"
        held = f", each expert on {said['expert_replicas']:,} groups of them" * (said["ep"] > 1)
        yield f"{axes}: {said['per_rank']:,} devices for each rank of the pipeline{held}"


DIRECTIVE = Directive(
    "parallel",
    _read,
    _write,
    check_schedule=_check_schedule,
    facts=_facts,
    text=_text,
)
