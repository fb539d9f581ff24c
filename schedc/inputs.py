"""Opens schedules in every form: a library name, a .sched file, a torch schedule CSV, or the text form of an order."""

from __future__ import annotations

import re
from dataclasses import replace
from os.path import isfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, RequestError
from schedc.ir.schedule import Schedule
from schedc.load.library import Given, InSlices, Text, named, open_named, open_schedule
from schedc.source import NOWHERE, Source
from schedc.step.legality import check_schedule
from schedc.syntax.input import AppliedPlan, Input, Order
from schedc.syntax.tree import ScheduleTree

_TEXT_FORM = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*schedule[ \t]+\d{1,9}[ \t]*\r?\n")
_CSV_FORM = re.compile(r"[\s,]*\d+[A-Z]")
"""The begin of a torch schedule CSV; no .sched file begins so."""
_CSV, _TEXT = ".csv", ".schedule"

MAX_ORDER = 1 << 28
"""The most bytes of an order."""


def open_input(argument: Given) -> Input:
    """Opens a SCHEDULE argument: the checked schedule or plan of a file or library name, or a legal order.

    Raises the `DiagnosticError` of `open_schedule`. An order raises everything that is wrong with it, and with the
    messages of a lowered CSV (S2xx, S3xx, S390, S601, S602, S604, S605). The lines of a plan are read when a step is
    lowered.
    """
    if isinstance(argument, InSlices):
        return replace(open_input(argument.named), slices=argument.slices)
    return open_order(argument) if is_order(argument) else open_named(argument)


def open_family(argument: Given) -> ScheduleTree:
    """Opens a schedule that has many sizes; for a plan, its schedule (see `plan_at`).

    Raises `DiagnosticError` (S606) for an order, which has one size.
    """
    if not is_order(argument):
        return open_schedule(argument)
    argument = named(argument)
    place = argument.source.place if isinstance(argument, Text) else argument
    message = f"{place} is the order of one size: nothing follows for other sizes"
    help = "give a .sched file or the name of a library schedule"
    raise RequestError([Diagnostic("S606", message, Label(NOWHERE), help=help)])


def plan_at(argument: Given) -> str:
    """A note that a plan's layers are left aside where only its schedule counts; empty for anything but a plan."""
    tree = None if is_order(argument) else open_named(argument)
    if not isinstance(tree, AppliedPlan):
        return ""
    return f"{tree.name} is a plan: what follows is about schedule `{tree.schedule.name}`, without layers"


def open_order(argument: Given) -> Order:
    """Opens a legal order in a CSV or text form; raises as `open_input`."""
    argument = named(argument)
    source = argument.source if isinstance(argument, Text) else load_text(Path(argument))
    suffix = Path(source.name).suffix.lower()
    csv = suffix == _CSV or (suffix != _TEXT and _CSV_FORM.match(source.text) is not None)
    return _read_csv(source) if csv else Order(_read_text(source))


def is_order(argument: Given) -> bool:
    """Whether an argument names an order: by the suffix of its path, or by the begin of its text."""
    argument = named(argument)
    if isinstance(argument, Text):
        return not argument.wanted and _begins_as_order(argument.source.text)
    path = Path(argument)
    if path.suffix.lower() in (_CSV, _TEXT):
        return True
    if path.suffix == ".sched" or not isfile(path):  # False, too, for a name that no system takes
        return False
    return _begins_as_order(load_text(path).text)


def _begins_as_order(text: str) -> bool:
    return (_TEXT_FORM.match(text) or _CSV_FORM.match(text)) is not None


def load_text(path: Path) -> Source:
    """The text of the file at a path; raises as `read`."""
    try:
        with path.open("rb") as file:
            return read(file, str(path))
    except (OSError, ValueError) as error:
        raise _refusal(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read(file: BinaryIO, name: str) -> Source:
    """The text of an order or a schedule. Orders may be much larger than .sched files: they have a word per op.

    Raises `RequestError` (S122) for a file above `MAX_ORDER` bytes, or one that is no UTF-8 text.
    """
    raw = file.read(MAX_ORDER + 1)
    if len(raw) > MAX_ORDER:
        raise _refusal(f"{name} is larger than {MAX_ORDER >> 20} MiB")
    try:
        return Source(name, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _refusal(f"{name} is not UTF-8 text (byte {error.start})") from None


def _refusal(message: str) -> RequestError:
    return RequestError([Diagnostic("S122", message, Label(NOWHERE))])


# What reads orders is imported where it is used: most inputs are schedules, and start faster without it.


def _read_csv(source: Source) -> Order:
    from schedc.interchange.check_lowered import check_lowered
    from schedc.interchange.lowered_values import LoweredValues, program_of
    from schedc.interchange.torch_cells import read_cells
    from schedc.interchange.torch_csv import schedule_of

    cells = read_cells(source)
    schedule = schedule_of(cells, name=_name(source))
    if findings := check_schedule(schedule) or check_lowered(cells, schedule):
        raise DiagnosticError(findings)
    return Order(schedule, program_of(LoweredValues(cells, schedule)) if cells.lowered else None)


def _read_text(source: Source) -> Schedule:
    """The schedule of a text form, without spans: they point into the file that the form was made from."""
    from schedc.ir.text import parse_schedule

    schedule = replace(without_places(parse_schedule(source.text, source.name)), source=source)
    if findings := check_schedule(schedule):
        raise DiagnosticError(findings)
    return schedule


def without_places(schedule: Schedule) -> Schedule:
    """The schedule without the places of its ops in a text."""
    return replace(schedule, span=np.zeros(len(schedule), np.int32), spans=(NOWHERE,), source=None)


def _name(source: Source) -> str:
    return Path(source.name.strip("<>")).stem or "imported"
