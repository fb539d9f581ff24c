"""Reads measured steps from a CSV file: one run of a model on a cluster per row, with its step time."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.planner.cluster.read import load_cluster
from schedc.planner.cluster.values import Cluster
from schedc.planner.fit.calibration import CalibratedRow, times_of, with_spreads
from schedc.planner.fit.columns import COLUMNS, MEASURED, REQUIRED, Column
from schedc.planner.fit.run_of_row import run_of
from schedc.planner.presets.tables import files
from schedc.planner.reading.texts import read_source
from schedc.planner.times.problem import TrainingRun
from schedc.source import Source
from schedc.step.costs.costs import load_costs

MOST_ROWS = 20_000

_AGREE = 0.02
"""The share by which two figures of one row may differ."""

Cells = Mapping[str, Any]


@dataclass(frozen=True)
class MeasuredRow:
    """A measured step. line: in the file. step_s: seconds. peak_bytes: largest memory of a rank; 0 where unknown.

    called: the schedule's name in the row's source.
    """

    line: int
    name: str
    run: TrainingRun
    step_s: float
    peak_bytes: float
    called: str


@dataclass(frozen=True)
class MeasuredRows:
    """The rows of a file. left_out: line, name and reason of each row that is not used. calibrated: times of parts."""

    source: Source
    rows: tuple[MeasuredRow, ...]
    left_out: tuple[tuple[int, str, str], ...]
    calibrated: tuple[CalibratedRow, ...] = ()

    @property
    def runs(self) -> list[TrainingRun]:
        """The runs of all rows, calibrated ones behind the others."""
        return [row.run for row in self.rows] + [row.run for row in self.calibrated]

    @property
    def devices(self) -> frozenset[str]:
        """Names of the devices."""
        return frozenset(run.cluster.device.name for run in self.runs)

    @property
    def precisions(self) -> frozenset[str]:
        return frozenset(run.problem.precision for run in self.runs)

    def only(self, called: str) -> MeasuredRows:
        """The rows of one schedule, by its name in the library or in their source."""
        wanted = tuple(
            row for row in self.rows if called.lower() in (row.called.lower(), row.run.axes.schedule.lower())
        )
        if not wanted:
            names = sorted({row.called for row in self.rows})
            help = did_you_mean(called, names)
            raise DiagnosticError([finding_at(self.source, 1, "S720", f"no row has the schedule `{called}`", help)])
        others = [(row.line, row.name, f"not of schedule {called}") for row in self.rows if row not in wanted]
        return replace(self, rows=wanted, left_out=(*self.left_out, *others))


def load_rows(path: Path) -> MeasuredRows:
    """The rows of a CSV file. Raises `DiagnosticError` (S720 to S724) with every finding."""
    return parse_rows(read_source(path, "S720", "file of rows"), path.parent)


def parse_rows(source: Source, folder: Path) -> MeasuredRows:
    """The rows of a CSV text; files that it names are relative to ``folder``. Raises as `load_rows`."""
    reader = csv.reader(io.StringIO(source.text), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise DiagnosticError(
            [finding_at(source, reader.line_num, "S720", f"not CSV: {error}", "quote cells")]
        ) from error
    if len(lines) < 2:
        raise DiagnosticError([finding_at(source, 1, "S720", "no rows", "write a head and one row per measured step")])
    if len(lines) > MOST_ROWS:
        message = f"{len(lines):,} rows; {MOST_ROWS:,} are the most"
        raise DiagnosticError([finding_at(source, 1, "S720", message, "split the file by device and software")])
    (_, names), *body = lines
    names = [name.strip() for name in names]
    _check_head(source, names)
    return _Reading(source, folder, names).read(body)


def _check_head(source: Source, names: Sequence[str]) -> None:
    findings = []
    for name in names:
        if name not in COLUMNS:
            help = did_you_mean(name, COLUMNS) or f"columns are {', '.join(COLUMNS)}"
            findings.append(finding_at(source, 1, "S721", f"no column is called `{name[:40]}`", help))
    findings += [
        finding_at(source, 1, "S721", f"column `{name}` is missing", "add it") for name in REQUIRED if name not in names
    ]
    if not set(names) & set(MEASURED):
        findings.append(finding_at(source, 1, "S721", "no column has a measurement", f"add {' or '.join(MEASURED)}"))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        findings.append(finding_at(source, 1, "S721", f"column `{twice}` stands twice", "keep one"))
    if findings:
        raise DiagnosticError(findings)


class _Reading:
    """The rows read so far, and what is wrong with them."""

    def __init__(self, source: Source, folder: Path, names: Sequence[str]) -> None:
        self.source, self.folder, self.names = source, folder, names
        self.findings: list[Diagnostic] = []
        self.clusters: dict[str, Cluster | None] = {}
        self.seen: dict[tuple[Any, ...], int] = {}

    def read(self, body: Sequence[tuple[int, Sequence[str]]]) -> MeasuredRows:
        rows: list[MeasuredRow] = []
        calibrated: list[CalibratedRow] = []
        left_out: list[tuple[int, str, str]] = []
        for line, texts in body:
            if len(texts) != len(self.names):
                message = f"{len(texts)} cells under {len(self.names)} columns"
                self._say(line, "S722", message, "write a comma per column")
                continue
            by_name = {name: text.strip() for name, text in zip(self.names, texts, strict=True)}
            name = by_name.get("row_id") or f"line {line}"
            if by_name.get("left_out"):
                left_out.append((line, name, by_name["left_out"]))
                continue
            cells = self._cells(line, by_name)
            row = None if cells is None else self._row(line, name, cells)
            if isinstance(row, CalibratedRow):
                calibrated.append(row)
            elif row is not None:
                rows.append(row)
        if self.findings:
            raise DiagnosticError(self.findings[:50])
        if not rows and not calibrated:
            raise DiagnosticError([finding_at(self.source, 1, "S720", "every row is left out", "keep some rows")])
        return MeasuredRows(self.source, tuple(rows), tuple(left_out), with_spreads(calibrated))

    def _cells(self, line: int, texts: Mapping[str, str]) -> dict[str, Any] | None:
        before = len(self.findings)
        cells: dict[str, Any] = {}
        for name, column in COLUMNS.items():
            text = texts.get(name, "")
            if not text and column.default is None:
                self._say(line, "S722", f"`{name}` is empty", "write it in each row")
            cells[name] = self._value(line, column, text) if text else column.default
        return cells if len(self.findings) == before else None

    def _value(self, line: int, column: Column, text: str) -> Any:
        if column.kind == "text":
            if column.among and text not in column.among:
                self._say(line, "S722", f"`{column.name}` is {text[:40]!r}", f"one of {', '.join(column.among)}")
            return text
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        whole = column.kind in ("whole", "flag")
        most = 1 if column.kind == "flag" else column.most
        if not math.isfinite(number) or not 0 <= number <= most or (whole and number != int(number)):
            kind = {"whole": "a whole number", "flag": "0 or 1", "number": "a number without a unit"}[column.kind]
            self._say(line, "S722", f"`{column.name}` is {text[:40]!r}", f"write {kind}, from 0 to {most:,}")
            return column.default
        return int(number) if whole else number

    def _row(self, line: int, name: str, cells: Cells) -> MeasuredRow | CalibratedRow | None:
        cluster = self._cluster(line, cells["cluster"])
        if cluster is None:
            return None
        try:
            run = run_of(cells, cluster, self.folder)
            if cells["calibration"]:
                return self._calibrated(line, name, cells, run)
        except ValueError as error:
            self._say(line, "S723", str(error), "correct the row, or give the reason in `left_out`")
            return None
        except DiagnosticError as error:
            self.findings.extend(error.diagnostics)
            return None
        step = self._step(line, cells, run)
        measured = (run, round(step, 9), cells["peak_gib"], cells["called"])
        first = self.seen.setdefault(measured, line)
        if first != line:
            self._say(line, "S724", f"the same row as line {first}", "delete one, or write `duplicate` in `left_out`")
        called = cells["called"] or run.axes.schedule
        return MeasuredRow(line, name, run, step, cells["peak_gib"] * 2**30, called)

    def _calibrated(self, line: int, name: str, cells: Cells, run: TrainingRun) -> CalibratedRow:
        """Raises `ValueError` for a calibration of another run, and `DiagnosticError` for a file that is none."""
        if cells["step_s"] or cells["tokens_per_s_per_device"]:
            raise ValueError("the row has a step and a calibration; a step is a row of its own")
        times = times_of(load_costs(self.folder / cells["calibration"]), run)
        if not times:
            raise ValueError(f"`{cells['calibration']}` has no time that the cost model predicts")
        return CalibratedRow(line, name, run, tuple(times))

    def _step(self, line: int, cells: Cells, run: TrainingRun) -> float:
        step, rate = cells["step_s"], cells["tokens_per_s_per_device"]
        tokens = run.problem.tokens / run.axes.devices
        if not step and not rate:
            self._say(line, "S722", "no measurement", f"write {' or '.join(MEASURED)}")
        elif step and rate and abs(tokens / step / rate - 1) > _AGREE:
            message = f"{step:g} s a step are {tokens / step:.1f} tokens/s/device, not {rate:g}"
            self._say(line, "S723", message, "correct the wrong figure, or keep only the measured one")
        return float(step or (tokens / rate if rate else 1.0))

    def _cluster(self, line: int, name: str) -> Cluster | None:
        if name not in self.clusters:
            try:
                self.clusters[name] = load_cluster(files("clusters").get(name) or self.folder / name)
            except DiagnosticError as error:
                self.findings.extend(error.diagnostics)
                self.clusters[name] = None
        return self.clusters[name]

    def _say(self, line: int, code: str, message: str, help: str) -> None:
        self.findings.append(finding_at(self.source, line, code, message, help))


def finding_at(source: Source, line: int, code: str, message: str, help: str) -> Diagnostic:
    """A finding whose place is a whole line of a file of rows, from 1."""
    start = sum(len(text) + 1 for text in source.lines[: line - 1])
    width = len(source.lines[line - 1]) if line <= len(source.lines) else 0
    label = Label(source.span_at(min(start, len(source.text)), min(start + width, len(source.text))))
    return Diagnostic(code, message, label, help=help, source=source)
