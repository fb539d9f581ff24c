"""Lines that note one thing.

``tokens``, ``states``, ``rows``, ``overlap``, ``shard``, ``tied``, ``attention``, ``communicators``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.diagnostics import Diagnostic
from schedc.ir.plan import BYTES, Plan
from schedc.ir.schedule import Schedule
from schedc.ir.ties import Tie, lies_apart
from schedc.plan.directives.base import Directive, Directives
from schedc.plan.layout.parts import Layout, PartKind
from schedc.syntax.plan import AttentionLine, FactorLine, SettingLine, TokensLine
from schedc.units import bytes_of, digits, exact_unit, shown


def flag(word: str, field: str, words: tuple[str, ...], on: str, what: str, **more: Any) -> Directive:
    """The row of a word with one of ``words``, of which ``on`` sets a field of the plan.

    what: the words, for messages. more: further functions of the row.
    """

    def read(reading: Directives, line: SettingLine) -> None:
        if reading.word(line.value, words, what):
            reading.give(**{field: line.value.text == on})

    def write(plan: Plan) -> Iterator[str]:
        if getattr(plan, field):
            yield f"{word} {on}"

    return Directive(word, read, **{"write": write, **more})


def number(word: str, example: str) -> Directive:
    """The row of a word with a number, which is the plan's field of this name. example: such a number."""

    def read(reading: Directives, line: FactorLine) -> None:
        if line.words:
            reading.report("S144", f"`{word}` takes a number alone", line.words[0].span, f"write `{word} {example}`")
        else:
            reading.give(**{word: line.factor})

    def write(plan: Plan) -> Iterator[str]:
        if getattr(plan, word) != getattr(Plan(), word):
            yield f"{word} {digits(getattr(plan, word))}"

    return Directive(word, read, write)


def _read_tokens(reading: Directives, line: TokensLine) -> None:
    if line.count < 1:
        reading.report("S146", "no tokens", line.span, "say how many a rank has in one microbatch")
        return
    reading.give(tokens=line.count)
    if line.words:
        option, dtype = line.words
        if reading.word(option, ("dtype",), "fact of the tokens") and reading.word(dtype, BYTES, "type of number"):
            reading.give(dtype=dtype.text)


def _write_tokens(plan: Plan) -> Iterator[str]:
    if plan.tokens:
        yield f"tokens {plan.tokens}" + (f" dtype {plan.dtype}" if plan.dtype else "")


def _read_attention(reading: Directives, line: AttentionLine) -> None:
    size = bytes_of(line.size.value, line.size.unit) if line.size.unit else None
    if not size:
        help = "write `attention 25 KB`: bytes per token, in KB to TB or KiB to TiB"
        reading.report("S146", "attention without bytes", line.size.span, help)
    else:
        reading.give(attention=size)


def _write_attention(plan: Plan) -> Iterator[str]:
    if plan.attention:
        yield f"attention {exact_unit(plan.attention)}"


def _read_communicators(reading: Directives, line: FactorLine) -> None:
    if line.words or line.factor < 1 or line.factor != int(line.factor):
        help = "write `communicators 4`: a number from 1 on, alone"
        reading.report("S146", "communicators that are no whole number", line.span, help)
    else:
        reading.give(communicators=int(line.factor))


def _write_communicators(plan: Plan) -> Iterator[str]:
    if plan.communicators:
        yield f"communicators {plan.communicators}"


def _row_facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """dispatch, combine: bytes of a row to the experts and back; null where the plan does not say its columns."""
    if not plan.fp8_rows:
        return {"rows": None}
    return {"rows": {"dispatch": plan.dispatch_row_bytes or None, "combine": plan.row_bytes or None}}


def _row_text(facts: dict[str, Any]) -> Iterator[str]:
    if (rows := facts["rows"]) is not None:
        sizes = f": {shown(rows['dispatch'])} each, back {shown(rows['combine'])}" if rows["dispatch"] else ""
        yield f"rows travel to their experts in fp8{sizes}"


def _write_overlap(plan: Plan) -> Iterator[str]:
    if plan.overlap and not plan.cells:
        yield "overlap auto"


def _check_overlap(reading: Directives) -> None:
    lines = [line for line in reading.tree.lines if isinstance(line, SettingLine) and line.word == "overlap"]
    if "cell" in reading.spans and any(line.value.text == "off" for line in lines):
        message = "the order of a cell, and `overlap off`"
        reading.report("S144", message, "overlap", "leave one of the two out")


def _overlap_text(facts: dict[str, Any]) -> Iterator[str]:
    if facts["overlap"]:
        orders = ", ".join(f"{cell['cell']} in the order of the plan" for cell in facts["cells"]) or "auto"
        yield f"overlap {orders}"


def _check_copies(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S144: a schedule that holds two copies of a stage sums their gradients whole."""
    homes = schedule.placement.rank_of_stage
    if directives.plan.shard_dense and (homes != homes[0]).any():
        message = f"`shard dense`, and {schedule.name} holds two copies of its stages"
        help = "take a schedule with one copy, as dualpipev in place of dualpipe, or leave `shard dense` out"
        yield directives.fault("shard", "S144", message, help)


def _shard_text(facts: dict[str, Any]) -> Iterator[str]:
    if "shard" in facts:
        yield "shard dense: replicas gather the dense parameters of a stage for its uses (`--replicas` prices that)"


def ties_of_plan(plan: Plan, layout: Layout) -> tuple[Tie, ...]:
    """The stages that use one table, as one tie; its bytes are known once the model is there.

    `tied embedding` ties the embedding, predictions that embed themselves, and the heads. Without it heads are tied.
    """
    embedding = (PartKind.EMBEDDING, *([] if layout.embeds_first else [PartKind.MTP])) if plan.tied else ()
    kinds = (*embedding, PartKind.HEAD)
    stages = [stage for stage, held in enumerate(layout.stages) if any(part.kind in kinds for part in held)]
    return (Tie(tuple(stages)),) if len(stages) > 1 else ()


def _check_ties(directives: Directives, schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
    """S303: two copies of each stage, and tied stages that do not share both ranks."""
    for tie in ties_of_plan(directives.plan, layout):
        if schedule.placement.pipes > 1 and lies_apart(tie, schedule.placement):
            stages = " and ".join(map(str, tie.stages))
            message = f"the stages {stages} are tied, have two copies each, and do not share their ranks"
            help = "put predictions and heads into the last stage, or take a schedule with one pipe"
            yield directives.fault("tied" if directives.plan.tied else "layout", "S303", message, help)


def _tie_facts(plan: Plan, layout: Layout) -> dict[str, Any]:
    """tied: the stages that use the embedding's table; null where they do not share it. tied_heads: without it, those
    that use the table of the heads, where several do."""
    ties = [list(tie.stages) for tie in ties_of_plan(plan, layout)]
    heads = {"tied_heads": ties} if ties and not plan.tied else {}
    return {"tied": ties if plan.tied else None} | heads


def _tie_text(facts: dict[str, Any]) -> Iterator[str]:
    for stages in facts["tied"] or ():
        yield f"tied embedding: the stages {' and '.join(map(str, stages))} use one table, and sum its gradients"
    for stages in facts.get("tied_heads", ()):
        yield f"tied heads: the stages {' and '.join(map(str, stages))} use one table, and sum its gradients"


NOTES = (
    Directive("tokens", _read_tokens, _write_tokens),
    number("states", "16"),
    flag("rows", "fp8_rows", ("same", "fp8"), "fp8", "type of rows that travel", facts=_row_facts, text=_row_text),
    flag(
        "overlap",
        "overlap",
        ("auto", "off"),
        "auto",
        "way to overlap",
        write=_write_overlap,
        check_lines=_check_overlap,
        facts=lambda plan, layout: {"overlap": plan.overlap},
        text=_overlap_text,
    ),
    flag(
        "shard",
        "shard_dense",
        ("dense",),
        "dense",
        "part of a model that replicas shard",
        check_schedule=_check_copies,
        facts=lambda plan, layout: {"shard": "dense"} if plan.shard_dense else {},
        text=_shard_text,
    ),
    flag(
        "tied",
        "tied",
        ("embedding",),
        "embedding",
        "part whose weights others use",
        check_schedule=_check_ties,
        facts=_tie_facts,
        text=_tie_text,
    ),
    Directive("attention", _read_attention, _write_attention),
    Directive("communicators", _read_communicators, _write_communicators),
)
"""The rows of these lines. A plan's canonical text ends with those that `DIRECTIVES` does not order."""
