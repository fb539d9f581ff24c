"""The table ``[cell]`` of a cost file: the blocks of the stages, how rows travel, and the times of segments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from schedc.cell.costs import AGAIN, CellCosts, SegmentTimes, SliceFactor
from schedc.cell.graph import LINKS, SPLITTING, Lane, StageShape
from schedc.cell.recomputed import REPEATING
from schedc.cell.rows import CellRows, Problem, read_rows, write_rows
from schedc.cell.standard_blocks import BESIDE_LAYERS, LAYERS, METHODS, ONCE, SPLIT_SEGMENTS, stage_shape
from schedc.diagnostics import CompilerBug
from schedc.ir.plan import CELL_EXCHANGES, CELL_SEGMENTS, MOST_SLICES

ROLES = (*CELL_SEGMENTS, "plan", "sized", "dense", *SPLIT_SEGMENTS)
SIZES = "sizes"
"""The role of the copy of sizes to the host. Its time makes it a node of the graphs."""
_LANES_OF = {**dict.fromkeys((*CELL_EXCHANGES, *sorted(SPLITTING)), LINKS), SIZES: (Lane.HOST,)}
LARGEST_STAGE = 4096
"""Most blocks of one stage; more is a mistake of the writer."""
MOST_FACTOR = 100.0
"""Largest factor; more is a mistake of the writer."""
_EXAMPLE = "write slices = {2 = 1.05, 4 = 1.15}, or [segments, exchanges] in place of a number"

_BLOCKS = re.compile(rf"({'|'.join((*LAYERS, *BESIDE_LAYERS))})(?:\*(\d{{1,4}}))?")


@dataclass(frozen=True)
class CellTable:
    """Times of cells, in the unit of the cost file, and the blocks of the stages.

    blocks: [stages] or [1] for all stages; each entry is a sequence of those of `schedc.cell.standard_blocks`.
    method: one of `schedc.cell.standard_blocks.METHODS`.
    rows: rows of the ranks of an expert group; None: all have as many.
    ordered_by: other times of some parts, by which orders inside cells are found; None: these are found by ``costs``.
    one_copy: the exchange that these orders take for that of copies of experts, if they take another than ``costs``.
    """

    costs: CellCosts
    blocks: tuple[tuple[str, ...], ...] = (("moe",),)
    method: str = "flat"
    rows: CellRows | None = None
    ordered_by: CellCosts | None = None
    one_copy: tuple[str, SegmentTimes] | None = None

    @cached_property
    def roles(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.costs.segments)

    @cached_property
    def ordering(self) -> CellCosts:
        """The times by which orders inside cells are found; programs made of them run under ``costs``."""
        costs = self.costs if self.one_copy is None else self.costs.with_exchange(*self.one_copy)
        if self.ordered_by is None:
            return costs
        segments, exchanges = (
            tuple((dict(own) | dict(other)).items())
            for own, other in (
                (costs.segments, self.ordered_by.segments),
                (costs.exchanges, self.ordered_by.exchanges),
            )
        )
        return CellCosts(segments, exchanges, costs.slices, brief=True)

    def shapes(self, stages: int, token_slices: Sequence[int] = ()) -> tuple[StageShape, ...]:
        """[stages] the graph of every stage. token_slices: [stages] slices of tokens; empty for whole sequences."""
        blocks = self.blocks if len(self.blocks) > 1 else self.blocks * stages
        if len(blocks) != stages:
            raise CompilerBug("cells", f"blocks of {len(blocks)} stages for {stages}")
        named = {_role(name) for name, _ in self.costs.exchanges}
        splits = self.splits
        rail = any(name.endswith("." + Lane.RAIL) and name.partition(".")[0] not in splits for name in named)
        hot = next((lane for lane in LINKS if f"hot.{lane}" in named), None)
        timed = {name.partition(".")[0] for name in named}
        shapes: dict[tuple[tuple[str, ...], int], StageShape] = {}
        rows = list(zip(blocks, token_slices or (1,) * stages, strict=True))
        for row, count in rows:
            if (row, count) not in shapes:
                shapes[row, count] = stage_shape(
                    row, self.method, "shared" in self.roles, nodes=2 if rail else 1,
                    hot=hot, distinct="distinct" in timed, balance="balance" in timed, sizes=self.costs.asks_host,
                    splits=splits, token_slices=count,
                )  # fmt: skip
        return tuple(shapes[row] for row in rows)

    @property
    def splits(self) -> dict[str, Lane]:
        """The lane of each exchange among tensor and context ranks, by role; empty where none has a time.

        Context ranks gather and scatter rows, too. Without tensor ranks this takes no time.
        """
        named = [_role(name).partition(".") for name, _ in self.costs.exchanges]
        splits = {role: Lane(lane) for role, _, lane in named if role in SPLITTING}
        return {"gather": Lane.NODE, "scatter": Lane.NODE, **splits} if splits else {}

    def without_exchange(self, role: str) -> CellTable:
        """The table of layers without exchanges of this role."""
        ordered_by = self.ordered_by and self.ordered_by.without_exchange(role)
        return replace(self, costs=self.costs.without_exchange(role), ordered_by=ordered_by)

    def with_exchange(self, name: str, times: SegmentTimes) -> CellTable:
        """The table with the times of one more exchange."""
        return replace(self, costs=self.costs.with_exchange(name, times))

    def with_blocks(self, blocks: Sequence[Sequence[str]]) -> CellTable:
        return replace(self, blocks=tuple(tuple(row) for row in blocks))


def parse_blocks(text: str) -> tuple[str, ...] | None:
    """The blocks of a text such as ``embedding dense*3 moe``; None for other texts.

    None also for more than `LARGEST_STAGE` blocks, and for one of `ONCE` that is there twice.
    """
    blocks: list[str] = []
    for word in text.split():
        match = _BLOCKS.fullmatch(word)
        if match is None:
            return None
        blocks += [match[1]] * int(match[2] or 1)
        if len(blocks) > LARGEST_STAGE:
            return None
    return None if any(blocks.count(block) > 1 for block in ONCE) else tuple(blocks)


def write_blocks(blocks: Sequence[str]) -> str:
    """The text that `parse_blocks` reads."""
    words: list[list[object]] = []
    for block in blocks:
        if words and words[-1][0] == block:
            words[-1][1] = int(str(words[-1][1])) + 1
        else:
            words.append([block, 1])
    return " ".join(f"{name}*{count}" if count != 1 else str(name) for name, count in words)


def read_table(values: Mapping[str, object], folder: Path = Path()) -> tuple[CellTable, list[Problem]]:
    """The table ``[cell]`` of a cost file, and its findings.

    Keys: ``stages``, ``method``; segments with {F, I, W, again}; exchanges with {rail, node}, each a time or [forward,
    backward]; ``sizes`` with {host}; ``slices`` with factors. Segments and exchanges that are left out take no time.
    ``ordered_by`` is a table with other times of segments and exchanges.
    """
    problems: list[Problem] = []
    times: dict[str, object] = {}
    factors: tuple[SliceFactor, ...] = ()
    table = CellTable(CellCosts())
    for key, value in values.items():
        new: list[Problem] = []
        if key == "stages":
            blocks, new = _stages(value)
            table = table.with_blocks(blocks)
        elif key == "method":
            new = [] if value in METHODS else [("S402", f"`method` is {value!r}", key, f"one of {', '.join(METHODS)}")]
            table = table if new else replace(table, method=str(value))
        elif key == "rows":
            rows, new = read_rows(value, folder)
            table = replace(table, rows=rows)
        elif key == "slices":
            factors, new = _read_factors(value)
        elif key == "ordered_by":
            ordered_by, new = _read_ordering(value, values)
            table = replace(table, ordered_by=ordered_by)
        else:
            times[key] = value
        problems += new
    costs, wrong = _read_costs(times)
    table = replace(table, costs=replace(costs, slices=factors))
    if table.splits and "dense" in table.roles:
        help = "give `after_gather` the time of an attention or an MLP, and leave `dense` out"
        wrong.append(("S402", "`dense` beside exchanges of tensor or context ranks", "dense", help))
    named = {_role(name) for name, _ in costs.exchanges}
    both = [role for role in table.splits if all(f"{role}.{lane}" in named for lane in LINKS)]
    wrong += [("S402", f"`{role}` has times on both links", role, "leave one of the times out") for role in both]
    return table, [*problems, *wrong]


def _read_costs(values: Mapping[str, object]) -> tuple[CellCosts, list[Problem]]:
    """The times of segments and exchanges, and their findings."""
    problems: list[Problem] = []
    segments: dict[str, SegmentTimes] = {}
    exchanges: dict[str, SegmentTimes] = {}
    for key, value in values.items():
        if key in BESIDE_LAYERS or _role(key) in ROLES:
            times, new = _times(key, value, ("F", "I", "W", *["again"] * (_role(key) in REPEATING)))
            if "again" in times:
                segments[key + AGAIN] = SegmentTimes(times["again"][0])
            segments[key] = SegmentTimes(*(times.get(letter, (0.0, 0.0))[0] for letter in ("F", "I", "W")))
        elif (lanes := _LANES_OF.get(_role(key))) is not None:
            times, new = _times(key, value, tuple(lane.value for lane in lanes), both=True)
            exchanges |= {f"{key}.{lane}": SegmentTimes(*pair) for lane, pair in times.items()}
        else:
            help = f"known here: {', '.join((*ROLES, *BESIDE_LAYERS, *_LANES_OF, 'slices', 'ordered_by'))}"
            new = [("S401", f"`{key}` is no part of a cell", key, help)]
        problems += new
    return CellCosts.of(segments, exchanges), problems


def _read_ordering(value: object, beside: Mapping[str, object]) -> tuple[CellCosts | None, list[Problem]]:
    """The times of ``ordered_by``, and its findings. beside: the table [cell]."""
    if not isinstance(value, dict):
        help = "write a table [cell.ordered_by] with parts of [cell], as attention = {F = 1.0, I = 1.0, W = 1.0}"
        return None, [("S402", f"`ordered_by` is {value!r}", "ordered_by", help)]
    costs, problems = _read_costs(value)
    for key in value:
        if key not in beside:
            message = f"`{key}` of `ordered_by` has no time in [cell]"
            problems.append(("S402", message, "ordered_by", "give times to parts that [cell] has, or leave it out"))
    return replace(costs, brief=True), problems


def _read_factors(value: object) -> tuple[tuple[SliceFactor, ...], list[Problem]]:
    """The factors of ``{2 = 1.05, 4 = [1.1, 1.02]}``, ascending by the number of slices, and its findings."""
    if not isinstance(value, dict):
        return (), [("S402", f"`slices` is {value!r}", "slices", _EXAMPLE)]
    factors: list[SliceFactor] = []
    for key, entry in value.items():
        pair = entry if isinstance(entry, list) and len(entry) == 2 else [entry, 1.0]
        if not key.isdecimal() or not 2 <= int(key) <= MOST_SLICES:
            help = f"a number of slices is from 2 to {MOST_SLICES}"
            return (), [("S402", f"`slices` has a factor for `{key}`", "slices", help)]
        if any(isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x <= MOST_FACTOR for x in pair):
            return (), [("S402", f"`{key}` of `slices` is {entry!r}", "slices", _EXAMPLE)]
        factors.append(SliceFactor(int(key), float(pair[0]), float(pair[1])))
    return tuple(sorted(factors)), []


def _role(key: str) -> str:
    """The role of a key: ``2.experts`` gives the experts of one layer their own time."""
    number, dot, role = key.partition(".")
    return role if dot and number.isdecimal() else key


def _stages(value: object) -> tuple[tuple[tuple[str, ...], ...], list[Problem]]:
    rows = value if isinstance(value, list) else [value]
    blocks = [parse_blocks(row) if isinstance(row, str) else None for row in rows]
    if not rows or any(row is None for row in blocks):
        help = 'write stages = "dense*3 moe", or a list with one text per stage; op, embedding and head stand once'
        return (("moe",),), [("S402", f"`stages` is {value!r}", "stages", help)]
    return tuple(row for row in blocks if row is not None), []


def _times(
    key: str, value: object, names: tuple[str, ...], both: bool = False
) -> tuple[dict[str, tuple[float, float]], list[Problem]]:
    """The times of one entry by name, [forward, backward] each, and its findings."""
    example = ", ".join(f"{name} = 1.0" for name in names)
    if not isinstance(value, dict):
        return {}, [("S402", f"`{key}` is not a table of times", key, f"write {key} = {{{example}}}")]
    times: dict[str, tuple[float, float]] = {}
    problems: list[Problem] = []
    for name, entry in value.items():
        pair = entry if both and isinstance(entry, list) and len(entry) == 2 else [entry, entry]
        if name not in names:
            problems.append(("S401", f"`{key}` has no `{name}`", key, f"known here: {', '.join(names)}"))
        elif any(isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= 1e15 for time in pair):
            what = "a number from 0 to 1e15" + (", or [forward, backward]" if both else "")
            problems.append(("S402", f"`{name}` of `{key}` is {entry!r}", key, f"a time is {what}"))
        else:
            times[name] = (float(pair[0]), float(pair[1]))
    return times, problems


def write_table(table: CellTable) -> list[str]:
    """The lines of ``[cell]``; `read_table` gives back an equal value."""
    rows = [f'"{write_blocks(row)}"' for row in table.blocks]
    lines = ["[cell]", f"stages = {rows[0] if len(rows) == 1 else '[' + ', '.join(rows) + ']'}"]
    lines.append(f'method = "{table.method}"')
    lines += _write_costs(table.costs)
    lines += _write_factors(table.costs.slices)
    if table.ordered_by is not None:
        lines += ["", "[cell.ordered_by]", *_write_costs(table.ordered_by)]
    return lines if table.rows is None else [*lines, "", *write_rows(table.rows)]


def _write_costs(costs: CellCosts) -> list[str]:
    """A line for each segment and exchange."""
    lines: list[str] = []
    again = {name: times.forward for name, times in costs.segments if name.endswith(AGAIN)}
    for name, times in costs.segments:
        if name in again:
            continue
        entries = ", ".join(f"{letter} = {time!r}" for letter, time in zip("FIW", times, strict=True))
        entries += f", again = {again[name + AGAIN]!r}" if name + AGAIN in again else ""
        lines.append(f"{_quoted(name)} = {{{entries}}}")
    lanes: dict[str, list[str]] = {}
    for name, times in costs.exchanges:
        label, _, lane = name.rpartition(".")
        pair = f"[{times[0]!r}, {times[1]!r}]" if times[0] != times[1] else repr(times[0])
        lanes.setdefault(label, []).append(f"{lane} = {pair}")
    return lines + [f"{_quoted(label)} = {{{', '.join(entries)}}}" for label, entries in lanes.items()]


def _quoted(name: str) -> str:
    return f'"{name}"' if "." in name else name


def _write_factors(factors: tuple[SliceFactor, ...]) -> list[str]:
    """The line of the factors; `_read_factors` gives back an equal value. Without factors there is no line."""
    rows = (
        f"{x.slices} = {x.segments!r}" if x.exchanges == 1 else f"{x.slices} = [{x.segments!r}, {x.exchanges!r}]"
        for x in factors
    )
    return [f"slices = {{{', '.join(rows)}}}"] if factors else []
