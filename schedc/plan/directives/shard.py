"""``shard dense``: dense parameters lie in parts on the replicas of a rank, which gather them for their uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.plan.directives.base import Directive, Directives, Reading
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import SettingLine


def _read(reading: Reading, line: SettingLine) -> None:
    if reading.word(line.value, ("dense",), "part of a model that replicas shard"):
        reading.give(shard_dense=True)


def _write(plan: Plan) -> Iterator[str]:
    if plan.shard_dense:
        yield "shard dense"


def _check_schedule(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S144: a schedule that holds two copies of a stage sums their gradients whole."""
    homes = schedule.placement.rank_of_stage
    if directives.plan.shard_dense and (homes != homes[0]).any():
        yield Diagnostic(
            "S144",
            f"`shard dense`, and {schedule.name} holds two copies of its stages",
            Label(directives.span("shard")),
            help="take a schedule with one copy, as dualpipev in place of dualpipe, or leave `shard dense` out",
            source=directives.tree.source,
        )


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    return {"shard": "dense"} if plan.shard_dense else {}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if "shard" in facts:
        yield "shard dense: replicas gather the dense parameters of a stage for its uses (`--replicas` prices that)"


DIRECTIVE = Directive("shard", _read, _write, check_schedule=_check_schedule, facts=_facts, text=_text)
