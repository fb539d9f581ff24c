"""Costs of ops and messages: one value or one per stage, from options, a TOML file, or the defaults."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.ir.arrays import Floats
from schedc.source import Source
from schedc.step.costs.checks import Cost, problem, problem_in, too_many_values, validated
from schedc.step.costs.kernels import KernelFamily, read_kernels, write_kernels
from schedc.step.costs.keys import CELL_KEYS, DEFAULTS, KEYS, NAMES, TABLES, with_keys
from schedc.step.costs.lanes import LaneEngine, read_lanes, slowdowns, write_lanes
from schedc.step.costs.microbatches import KEY as MICROBATCHES
from schedc.step.costs.microbatches import Factors, MicrobatchFactors, read_microbatches, write_microbatches
from schedc.step.costs.parts import PartCosts, read_parts, write_parts

if TYPE_CHECKING:
    from schedc.cell.table import CellTable
    from schedc.ir.schedule import Schedule


ANCHORS = frozenset({"F", "B"})
"""Keys that say which unit a file's times are in: beside them no other time has a default of 1."""


@dataclass(frozen=True)
@with_keys(default=lambda key: key.default)
class Costs:
    """Costs as they are given; the keys are the rows of `schedc.step.costs.keys.KEYS`, also those without a line here.

    Times are per chunk (one stage), in any one unit. B defaults to I + W, R to F, and FB, an overlapped pair, to F + B.
    A pair takes the FB of its forward's stage. pending_weight over activation is the zero-bubble papers' M_W over M_B.
    recompute_in_backward: time. How much longer a backward without an R takes, because it recomputes inside itself.
        Set by plans, never read from a file.
    restored: memory that a microbatch with an R holds from that R on; by default ``activation``. Set by plans, never
        read from a file.
    cell: times inside of cells, if known (`schedc.step.cells.cell_pricing` prices a schedule by them).
    lanes: what moves the bytes of works beside compute, and how much that slows compute down; empty where nothing is
        said. Only a step with works depends on it.
    kernels: who multiplies rows of experts, by shape and rows, for a `Pipeline`. No time follows from it.
    parts: times of the parts of a model, in place of F, I, W and B; a plan's layout makes times of stages of them.
    microbatches: [microbatches] or [stages][microbatches] factors of all times of ops; empty where all cost the same.
    given: the keys that a file or a measurement gives. Empty if every key counts, as for costs made in Python.
    """

    F: Cost = DEFAULTS["F"]
    I: Cost = DEFAULTS["I"]  # noqa: E741
    W: Cost = DEFAULTS["W"]
    B: Cost | None = None
    FB: Cost | None = None
    p2p: float = DEFAULTS["p2p"]
    dp: float = DEFAULTS["dp"]
    activation: Cost = DEFAULTS["activation"]
    pending_weight: Cost = DEFAULTS["pending_weight"]
    R: Cost | None = None
    recomputed: Cost = DEFAULTS["recomputed"]
    recompute_in_backward: Cost = 0.0
    restored: Cost | None = None
    cell: CellTable | None = None
    lanes: tuple[LaneEngine, ...] = ()
    kernels: tuple[KernelFamily, ...] = ()
    parts: PartCosts | None = None
    microbatches: Factors = ()
    source: Source | None = field(default=None, compare=False, repr=False)
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @classmethod
    def from_options(cls, options: Iterable[str], base: Costs | None = None) -> Costs:
        """Costs of ``KEY=VALUE`` options, over those of ``base`` (a file, or the defaults).

        VALUE is a number, or comma-separated numbers, one per stage. The last of two options with one key
        wins. `microbatches` has a factor per microbatch. Raises `DiagnosticError` with every wrong option (S401, S402,
        S403, S411, S412).
        """
        base = base or cls()
        given: dict[str, Cost | Factors] = {}
        findings: list[Diagnostic] = []
        for option in options:
            source = Source(f"--cost {option}", option)
            key, equals, text = (part.strip() for part in option.partition("="))
            if equals and key == MICROBATCHES:
                value = _numbers(text)
                given[key], wrong = read_microbatches([value] if isinstance(value, float) else value, source)
                findings += wrong
            elif equals:
                good, problems = validated({key: _numbers(text)}, NAMES, source)
                given |= good
                findings += problems + _beside_parts(base, good, source)
            else:
                findings.append(problem("S403", f"`{option}` is not a cost", source, help="write KEY=VALUE, as F=1.5"))
        if findings:
            raise DiagnosticError(findings)
        named = base.given | given.keys() - {MICROBATCHES} if base.given & (ANCHORS | {"parts"}) else base.given
        return replace(base, **given, given=named)  # type: ignore[arg-type]

    @property
    def uniform(self) -> bool:
        """Whether every stage costs the same time for microbatches of one factor."""
        times = (getattr(self, name) for name in (*CELL_KEYS, "recompute_in_backward"))
        return all(not isinstance(cost, tuple) or len(set(cost)) == 1 for cost in times)

    def resolved(self, stages: int) -> StageCosts:
        """The costs of each of ``stages`` stages.

        Raises `DiagnosticError`: S404 for a list of another length, S411 for times of parts, which need a layout, S412
        for factors of microbatches that are no factors.
        """
        self.check_of_stages()
        findings = [
            problem("S404", f"`{key}` has {_count(len(value), 'value')}, the schedule has {_count(stages, 'stage')}",
                     self.source, key, help=f"give {stages} values, one per stage, or a single one for all")
            for key in NAMES if isinstance(value := getattr(self, key), tuple) and len(value) != stages
        ]  # fmt: skip
        if findings:
            raise DiagnosticError(findings)

        def lane(cost: Cost) -> Floats:
            return np.broadcast_to(np.asarray(cost, np.float64), (stages,))

        columns: dict[str, Any] = {}
        for key in KEYS:  # a key comes behind the keys of its default sum
            if (cost := getattr(self, key.name)) is None:
                columns[key.name] = None if key.enters == "pair" else key.summed(columns)
            else:
                columns[key.name] = lane(cost) if key.per_stage else float(cost)
        restored = lane(self.activation if self.restored is None else self.restored)
        return StageCosts(**columns, recompute_in_backward=lane(self.recompute_in_backward), restored=restored,
                          slowdown=slowdowns(self.lanes),
                          microbatches=MicrobatchFactors.of(self.microbatches, stages, self.source))  # fmt: skip

    def factors_of(self, schedule: Schedule) -> Floats | None:
        """[1 or stages, microbatches] factors; None where all microbatches cost the same. Raises S404 and S412."""
        factors = MicrobatchFactors.of(self.microbatches, schedule.stages, self.source)
        return None if factors is None else factors.of_schedule(schedule)

    def check_of_stages(self) -> None:
        """Raise `DiagnosticError` (S411) for times of parts: no layout says the parts of each stage."""
        if self.parts is not None:
            message = "the costs give times of the parts of a model, which only a plan puts into stages"
            help = "write a plan with `layers N` for the schedule, or give F, I and W in the table [ops]"
            raise DiagnosticError([problem("S411", message, self.source, "parts", help=help)])


@dataclass(frozen=True, eq=False)
@with_keys(among=CELL_KEYS)
class OpCosts:
    """The costs that times of ops and pairs follow from: one vector, or K side by side.

    F, I, W, B, R, keys that every op takes: [stages] times, or [rows, K], rows being 1 or the number of stages.
    FB: time of a pair, by the stage of its forward. With None, or a NaN for a vector, a pair takes F + B of its two
    stages. p2p: time of a message, or [K].
    """

    F: Floats
    I: Floats  # noqa: E741
    W: Floats
    B: Floats
    R: Floats
    FB: Floats | None
    p2p: Any


@dataclass(frozen=True, eq=False)
@with_keys()
class StageCosts(OpCosts):
    """`Costs` of a known number of stages.

    recompute_in_backward: [stages] times. dp: time, as there. activation, pending_weight, recomputed, restored:
    [stages] memory.
    slowdown: [lanes of works] by how much more than alone compute takes while a lane is busy; 0.08 for 8 % more.
    microbatches: factors of the times of ops; None where all microbatches cost the same.
    """

    p2p: float
    recompute_in_backward: Floats
    dp: float
    activation: Floats
    pending_weight: Floats
    recomputed: Floats
    restored: Floats
    slowdown: Floats
    microbatches: MicrobatchFactors | None = None


SCHEMA = "schedc.costs/1"


def load_costs(path: str | Path) -> Costs:
    """The costs of a file; raises `DiagnosticError` for a file that cannot be read (S405) or is wrong."""
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        unreadable = problem("S405", f"cannot read the cost file `{path}`: {error}", None)
        raise DiagnosticError([unreadable]) from error
    return parse_costs(Source(str(path), text))


def parse_costs(source: Source) -> Costs:
    """The costs of a TOML text.

    Key ``schema``, and three tables that may be left out, as may each of their keys:

    * ``[ops]``: F, I, W, B, R, FB, p2p, dp, each a number or (but p2p and dp) a list with one number per stage.
    * ``[memory]``: activation, pending_weight and recomputed, likewise.
    * ``[parts]``: that of `schedc.step.costs.parts`, in place of F, I, W and B.
    * ``[cell]``: that of `schedc.cell.table`; ``[cell.rows]``: that of `schedc.cell.rows`.
    * Key ``microbatches``: that of `schedc.step.costs.microbatches`.
    * ``[lanes.d2h]``: those of `schedc.step.costs.lanes`; ``[[kernels]]``: those of `schedc.step.costs.kernels`.

    Raises `DiagnosticError` with everything that is wrong (S401, S402, S405, S411, S412).
    """
    for key in ("per_rank", MICROBATCHES):
        if (finding := too_many_values(source, key)) is not None:
            raise DiagnosticError([finding])
    values = parse_toml(source)
    schema = values.pop("schema", None)
    findings: list[Diagnostic] = []
    if schema != SCHEMA:
        schema_text = "no schema" if schema is None else f"schema {schema!r}"
        findings.append(
            problem("S405", f"a cost file with {schema_text}", source, "schema", help=f'write schema = "{SCHEMA}"')
        )
    costs: dict[str, Any] = {}
    for name, table in values.items():
        if name in _OTHER_TABLES and (isinstance(table, dict) or name in _LISTS):
            costs[name], wrong = _OTHER_TABLES[name](table, source)
            findings += wrong
        elif name not in TABLES and name not in _OTHER_TABLES:
            known = did_you_mean(name, (*TABLES, *_OTHER_TABLES))
            help = f"`{name}` belongs in a table: [ops] or [memory]" if name in NAMES else known
            findings.append(problem("S401", f"`{name}` is no part of a cost file", source, name, help=help))
        elif not isinstance(table, dict):
            findings.append(problem("S402", f"`{name}` is not a table", source, name, help=f"write [{name}]"))
        else:
            good, wrong = validated(table, TABLES[name], source)
            costs |= good
            findings += wrong
    result = Costs(**costs, source=source, given=frozenset(costs) - {MICROBATCHES})
    if findings := findings + _beside_parts(result, costs, source):
        raise DiagnosticError(findings)
    return result


_OF_PARTS, _OF_STAGES = ("F", "I", "W", "B"), ("R", "FB")
"""The times that follow from those of parts, and those that may be given beside them, as a list by stage."""


def _beside_parts(costs: Costs, given: Mapping[str, object], source: Source) -> list[Diagnostic]:
    """The findings (S411) about times of ops that are given beside times of parts."""
    if costs.parts is None:
        return []
    help = "leave it out, or the table [parts]"
    told = {key: help for key in given if key in _OF_PARTS}
    told |= {
        key: f"{help}; or give a list with one time per stage"
        for key in given
        if key in _OF_STAGES and not isinstance(given[key], tuple)
    }
    message = "`{}` is the time of an op, and the table [parts] gives times of what ops run"
    return [problem_in(source, "ops", key, "S411", message.format(key), help) for key, help in told.items()]


def _cell(table: dict[str, Any], source: Source) -> tuple[CellTable, list[Diagnostic]]:
    from schedc.cell.table import read_table  # few cost files have one

    cell, wrong = read_table(table, Path(source.name).parent)
    return cell, [problem(code, text, source, _setting(source, key), help) for code, text, key, help in wrong]


_OTHER_TABLES: Mapping[str, Callable[[Any, Source], tuple[Any, list[Diagnostic]]]] = {
    "cell": _cell,
    "lanes": read_lanes,
    "kernels": read_kernels,
    "parts": read_parts,
    MICROBATCHES: read_microbatches,
}
"""What reads the tables whose entries are no costs of ops, by name, each into the field of that name."""

_LISTS = ("kernels", MICROBATCHES)
"""Keys with a list as their value."""


def _setting(source: Source, key: str) -> str:
    """A part of a cell is set in a line of its own, or by a table."""
    return f"cell.{key}" if f"[cell.{key}]" in source.text else key


def dump_costs(costs: Costs) -> str:
    """The TOML text of ``costs``, or of their ``given`` keys if any; `parse_costs` gives back an equal value."""
    lines = [f'schema = "{SCHEMA}"', *write_microbatches(costs.microbatches)]
    for table, keys in TABLES.items():
        values = {key: getattr(costs, key) for key in keys if not costs.given or key in costs.given}
        entries = [f"{key} = {_number(value)}" for key, value in values.items() if value is not None]
        lines += ["", f"[{table}]", *entries] if entries else []
    if costs.cell is not None:
        from schedc.cell.table import write_table

        lines += ["", *write_table(costs.cell)]
    lines += write_parts(costs.parts) if costs.parts is not None else []
    lines += [*write_lanes(costs.lanes), *write_kernels(costs.kernels)]
    return "\n".join([*lines, ""])


def _number(cost: Cost) -> str:
    return f"[{', '.join(repr(float(c)) for c in cost)}]" if isinstance(cost, tuple) else repr(float(cost))


def parse_toml(source: Source) -> dict[str, Any]:
    """The tables of a TOML text; raises `DiagnosticError` (S405) with the place where it is none."""
    try:
        return tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(place[1]), int(place[2])) if place else (len(source.lines), 1)
        start = sum(len(text) + 1 for text in source.lines[: line - 1]) + column - 1
        start = min(start, len(source.text))
        raise DiagnosticError([
            Diagnostic("S405", f"not TOML: {str(error).split(' (at')[0]}",
                       Label(source.span_at(start, min(start + 1, len(source.text)))), source=source,
                       help='costs are TOML, in lines such as `F = 1.5`')
        ]) from error  # fmt: skip


def _numbers(text: str) -> object:
    """The number, the list of numbers, or the text itself where it is neither."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        return text
    return values if len(values) > 1 else values[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
