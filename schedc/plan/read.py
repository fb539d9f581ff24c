"""The directives of a plan, from its lines to values, with what is wrong in each line at its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedc.cell.written_order import ALIASES, EXCHANGES, SEGMENTS
from schedc.cost.exchange import Topology
from schedc.diagnostics import did_you_mean
from schedc.plan.directives import Directives, RecomputeRequest
from schedc.plan.units import speed_of
from schedc.plan.values import (
    BYTES,
    By,
    Capacity,
    CellPlan,
    Drop,
    ExpertSizes,
    Hot,
    Level,
    Method,
    Recompute,
)
from schedc.source import Span
from schedc.syntax.plan import (
    CapacityLine,
    CellLane,
    CellLine,
    Directive,
    ExpertsLine,
    HotLine,
    PlanTree,
    RecomputeLine,
    RecomputePart,
    SettingLine,
    TokensLine,
    TopologyLine,
    Word,
)


def read_directives(tree: PlanTree) -> Directives:
    """The directives of a plan. Lines that are wrong are reported in ``findings``, and say nothing else."""
    found = Directives(tree)
    for line in tree.lines:
        if isinstance(line, Directive):
            word = line.setting if isinstance(line, SettingLine) else _WORDS[type(line)]
            if word in found.spans and word not in ("recompute", "cell"):
                found.fault("S144", f"`{word}` is said twice", line.span, f"keep one `{word}` line")
                continue
            found.spans.setdefault(word, line.span)
            _READERS[type(line)](found, line)
    return found


def _experts(found: Directives, line: ExpertsLine) -> None:
    known = ("top", "groups", "limit", "shared", "width", "hidden")
    values: dict[str, int] = {}
    for option in line.options:
        if not found.word(Word(option.name, option.span), known, "fact of the experts"):
            continue
        if option.name in values:
            found.fault("S144", f"`{option.name}` is said twice", option.span, "keep one of the two")
        values[option.name] = int(option.value)
    if "top" not in values:
        found.fault("S145", "experts, and not how many of them a token takes", line.span, "write `top 8` behind them")
        return
    if "limit" in values and "groups" not in values:
        found.fault("S145", "a limit of groups, and no groups", line.span, "write `groups 8 limit 4`")
        return
    values.setdefault("limit", values.get("groups", 1))
    experts = ExpertSizes(line.count, **values)
    if (problem := _misfit(experts, values)) is None:
        found.give(experts=experts)
    else:
        found.fault("S145", problem[0], line.span, problem[1])


def _misfit(experts: ExpertSizes, said: dict[str, int]) -> tuple[str, str] | None:
    """What is wrong with the numbers of a MoE, and what to do."""
    count, top, groups, limit = experts.count, experts.top, experts.groups, experts.limit
    if not 1 <= top <= count <= MOST_EXPERTS:
        return f"the top {top} of {count} experts", f"a token takes from 1 to all of up to {MOST_EXPERTS:,} experts"
    if not 1 <= groups <= MOST_GROUPS or count % groups:
        help = f"groups are equal: take a number up to {MOST_GROUPS:,} that divides the experts"
        return f"{count} experts in {groups} groups", help
    if not 1 <= limit <= groups:
        return f"{limit} of {groups} groups", "a token may use from 1 to all of the groups"
    if top > count // groups * limit:
        room = count // groups * limit
        return f"the top {top} of the {room} experts in {limit} groups", f"allow more groups, or take at most {room}"
    if zero := [name for name in ("width", "hidden") if name in said and said[name] < 1]:
        return f"a {zero[0]} of {said[zero[0]]}", "it is a number of columns"
    return None


MOST_EXPERTS = 65_536
MOST_GROUPS = 1_024
MOST_RANKS = 65_536


def _topology(found: Directives, line: TopologyLine) -> None:
    shape = zip(line.words, ("nodes", "x"), strict=True)
    good = [found.word(word, (known,), "part of a topology") for word, known in shape]
    speeds: dict[str, float] = {}
    for link in line.links:
        if not found.word(Word(link.name, link.span), ("rail", "node"), "link"):
            continue
        if link.name in speeds:
            found.fault("S144", f"`{link.name}` is said twice", link.span, "keep one of the two")
        speed = speed_of(link)
        if speed is None or speed <= 0:
            help = f"write it as `{link.name} 50 GB/s`; Gbit/s and GiB/s are known too"
            found.fault("S146", f"`{link.name}` without a speed", link.span, help)
        speeds[link.name] = speed or 0.0
    if line.nodes < 1 or line.per_node < 1 or line.nodes * line.per_node > MOST_RANKS:
        found.fault(
            "S146", f"{line.nodes} nodes of {line.per_node} ranks", line.span, f"from 1 to {MOST_RANKS:,} ranks"
        )
    elif all(good):
        found.give(topology=Topology(line.nodes, line.per_node, **speeds))


def _tokens(found: Directives, line: TokensLine) -> None:
    if line.count < 1:
        found.fault("S146", "no tokens", line.span, "say how many a rank has in one microbatch")
        return
    found.give(tokens=line.count)
    if line.words:
        what, dtype = line.words
        if found.word(what, ("dtype",), "fact of the tokens") and found.word(dtype, BYTES, "type of number"):
            found.give(dtype=dtype.text)


def _setting(found: Directives, line: SettingLine) -> None:
    if line.setting == "overlap":
        if found.word(line.value, ("auto", "off"), "way to overlap"):
            found.give(overlap=line.value.text == "auto")
    elif found.word(line.value, [str(method) for method in Method], "All-to-All"):
        found.give(method=Method(line.value.text))


def _capacity(found: Directives, line: CapacityLine) -> None:
    drop = Drop.PROBS
    if line.words:
        what, value = line.words
        if not (
            found.word(what, ("drop",), "part of a capacity") and found.word(value, [*map(str, Drop)], "way to drop")
        ):
            return
        drop = Drop(value.text)
    found.give(capacity=Capacity(line.factor, drop))


def _hot(found: Directives, line: HotLine) -> None:
    if isinstance(line.count, Word) and not found.word(line.count, ("auto",), "number of hot experts"):
        return
    known = (("until",), ("imbalance",), ("<",))
    if not all(found.word(word, said, "end of hot experts") for word, said in zip(line.words, known, strict=False)):
        return
    if line.below is not None and line.below < 1:
        found.fault(
            "S146", f"an imbalance below {line.below:g}", line.span, "it is 1 where all ranks have the same rows"
        )
        return
    found.give(hot=Hot(line.count if isinstance(line.count, int) else None, line.below))


def _recompute(found: Directives, line: RecomputeLine) -> None:
    parts = list(line.parts)
    scope: str = "all"
    numbers: tuple[int, ...] = ()
    if parts[0].form in ("counted", "stages") or parts[0].name == "all":
        head = parts.pop(0)
        scope, numbers = head.name, tuple(int(number) for number in head.numbers)
        if scope not in ("all", "chunk", "stage"):
            found.word(Word(scope, head.span), ("chunk", "stage", "all"), "part of a model")
            return
    if (recompute := _level(found, parts, line.span)) is not None:
        found.requests.append(RecomputeRequest(scope, numbers, recompute, line.span))


def _level(found: Directives, parts: list[RecomputePart], span: Span) -> Recompute | None:
    """The level, ``adaptive(s)`` and ``by rank``, or ``in bubbles``; None where something is wrong."""
    level, adaptive, by = None, None, None
    if bubbles := bool(parts) and parts[-1].form == "placed":
        placed = parts.pop()
        if not found.word(Word(placed.name, placed.span), ("bubbles",), "place to recompute"):
            return None
    if parts and parts[0].form == "word" and parts[0].name != "by":
        if not found.word(
            Word(parts[0].name, parts[0].span), [str(level) for level in Level], "level of recomputation"
        ):
            return None
        level = Level(parts.pop(0).name)
    if parts and parts[0].form == "adaptive":
        if not found.word(Word(parts[0].name, parts[0].span), ("adaptive",), "way to recompute"):
            return None
        adaptive = parts.pop(0).numbers[0]
    if adaptive is not None and [part.name for part in parts[:1]] == ["by"] and len(parts) == 2:
        if not found.word(Word(parts[1].name, parts[1].span), [str(by) for by in By], "way to decide"):
            return None
        by = By(parts[1].name)
        parts = []
    if parts or (level is None and adaptive is None):
        form = (
            "write `recompute chunk 0 light`, `stage [0, 3]` or `all` in place of the chunk, `adaptive(2.0)` or "
            "`in bubbles` behind it"
        )
        found.fault("S149", "a recomputation that cannot be read", parts[0].span if parts else span, form)
        return None
    level = level or Level.FULL
    if adaptive is not None and (adaptive < 1 or level is Level.NONE):
        help = "it recomputes where a rank has more than so many times the mean: a number from 1, and a level"
        found.fault("S149", f"`adaptive({adaptive:g})` of level {level}", span, help)
        return None
    if bubbles and (adaptive is not None or level is Level.NONE):
        help = "write for example `recompute full in bubbles`: what is placed is the same in all microbatches"
        what = "`adaptive`" if adaptive is not None else "level none"
        found.fault("S149", f"a recomputation of {what} in bubbles", span, help)
        return None
    return Recompute(level, adaptive, by or (By.GROUP if level.exchanges or adaptive is None else By.RANK), bubbles)


def _cell(found: Directives, line: CellLine) -> None:
    kind = line.first.text + line.second.text
    if kind not in ("FB", "FI"):
        found.fault(
            "S147", f"a cell `{line.first.text} & {line.second.text}`", line.second.span, "write F & B or F & I"
        )
        return
    again = f"cell {kind}" in found.spans
    found.spans.setdefault(f"cell {kind}", line.span)
    lanes = {lane.name.text: lane for lane in line.lanes}
    good = [found.word(lane.name, ("compute", "comm"), "lane of a cell") for lane in line.lanes]
    if again or len(lanes) < len(line.lanes):
        found.fault(
            "S147", "an order that is given twice", line.span, "keep one, with one `compute` and one `comm` lane"
        )
    elif line.value is not None:
        if found.word(line.value, ("auto",), "order of a cell"):
            found.give(overlap=True)
    elif not lanes or not all(lane.steps for lane in line.lanes):
        help = "name steps, as `compute F.attn B.mlp.I comm F.dispatch`, or write `cell F & B auto`"
        found.fault("S147", "a cell, or a lane of it, without steps", line.span, help)
    elif all(good):
        compute = _steps(found, lanes.get("compute"), SEGMENTS, ("", "I", "W"))
        communication = _steps(found, lanes.get("comm"), EXCHANGES, ("",))
        found.give(overlap=True, cells=(*found.plan.cells, CellPlan(kind, compute, communication)))


def _steps(found: Directives, lane: CellLane | None, roles: tuple[str, ...], parts: tuple[str, ...]) -> tuple[str, ...]:
    """The steps of a lane under the names of the roles, ``F.attention`` for ``F.attn``."""
    steps: list[str] = []
    for step in lane.steps if lane else ():
        letter, role, *part = step.text.split(".")
        role = ALIASES.get(role, role)
        name = ".".join((letter, role, *part))
        if letter not in ("F", "B") or len(part) > 1 or (part and (part[0] not in parts or letter == "F")):
            help = "write F.role, B.role.I or B.role.W; exchanges have no part"
            found.fault("S147", f"`{step.text}` is no step", step.span, help)
        elif role not in roles:
            help = did_you_mean(role, (*roles, *(ALIASES if roles is SEGMENTS else ())))
            help = "segments stand in `compute`, exchanges in `comm`" if role in (*SEGMENTS, *EXCHANGES) else help
            found.fault("S147", f"`{role}` is no step of this lane", step.span, help)
        elif name in steps:
            found.fault("S147", f"`{step.text}` stands twice in one lane", step.span, "name each step of a layer once")
        else:
            steps.append(name)
    return tuple(steps)


_READERS: dict[type, Callable[[Directives, Any], None]] = {
    ExpertsLine: _experts,
    TopologyLine: _topology,
    TokensLine: _tokens,
    SettingLine: _setting,
    CapacityLine: _capacity,
    HotLine: _hot,
    RecomputeLine: _recompute,
    CellLine: _cell,
}
_WORDS = {
    ExpertsLine: "experts",
    TopologyLine: "topology",
    TokensLine: "tokens",
    CapacityLine: "capacity",
    HotLine: "hot",
    RecomputeLine: "recompute",
    CellLine: "cell",
}
