"""Finds schedules and plans: shipped files by name, other files by path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from glob import glob
from os.path import isfile
from pathlib import Path
from typing import NamedTuple, TypeAlias

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, RequestError, did_you_mean
from schedc.elaborate.names import checked
from schedc.elaborate.sizes import BOUNDS
from schedc.source import NOWHERE, Source, first_sentence
from schedc.syntax.input import AppliedPlan
from schedc.syntax.parser import parse
from schedc.syntax.plan import PlanTree
from schedc.syntax.tokens import MAX_FILE
from schedc.syntax.tree import FileTree, ScheduleTree

_SUFFIX = ".sched"


@dataclass(frozen=True)
class Text:
    """A text in place of a path, as it came through a pipe. wanted: the name of one of its schedules or plans."""

    source: Source
    wanted: str = ""


@dataclass(frozen=True)
class InSlices:
    """A schedule or plan whose microbatches all run in so many slices, whatever its plan says of slices."""

    named: str | Path | Text
    slices: int


Given: TypeAlias = str | Path | Text | InSlices
"""Names a schedule or a plan: a library name, a path with or without ``:name``, or the text itself."""


def named(argument: Given) -> str | Path | Text:
    """What names the schedule or plan, without slices."""
    return argument.named if isinstance(argument, InSlices) else argument


@lru_cache(maxsize=1)
def library_folder() -> Path:
    """The folder of the shipped schedules: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "schedules"
    return installed if installed.is_dir() else package.parent / "schedules"


def path_from_here(path: Path) -> str:
    """The path relative to the current folder where it is below that; else the whole path."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def names() -> list[str]:
    """The names of the shipped schedules."""
    return sorted(file.removesuffix(_SUFFIX) for file in glob(f"*{_SUFFIX}", root_dir=library_folder()))


class LibraryEntry(NamedTuple):
    """A schedule that ships with schedc. title: the first sentence of its text. sizes: its parameters with defaults."""

    name: str
    title: str
    sizes: dict[str, int | None]


def library() -> tuple[LibraryEntry, ...]:
    """The shipped schedules, by name: what `schedc list` prints."""
    trees = [open_schedule(name) for name in names()]
    return tuple(
        LibraryEntry(name, first_sentence(tree.doc), {each.name: each.default for each in tree.parameters})
        for name, tree in zip(names(), trees, strict=True)
    )


def load(name_or_path: str | Path) -> Source:
    """The text of a shipped schedule, or of the file at a path. Raises `DiagnosticError` (S121, S122).

    ``dualpipev`` is always the shipped one, ``dualpipev.sched`` only where there is no such file.
    """
    name = str(name_or_path)
    path = Path(name)
    if name in names() or (name.removesuffix(_SUFFIX) in names() and not path.exists()):
        shipped = library_folder() / f"{name.removesuffix(_SUFFIX)}{_SUFFIX}"
        return Source(shipped.name, _read(shipped), path_from_here(shipped))
    if path.suffix == _SUFFIX or isfile(path):
        return Source(name, _read(path))
    help = did_you_mean(name, names()) or "`schedc list` names the schedules of the library"
    raise _refusal("S121", f"there is no schedule `{name}` in the library, nor a file of that name", help)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE + 1)  # one byte above the limit: the parser refuses it
        return raw[:MAX_FILE].decode("utf-8") if len(raw) <= MAX_FILE else raw.decode("utf-8", errors="replace")
    except UnicodeDecodeError as error:
        raise _refusal("S122", f"{path} is not UTF-8 text (byte {error.start})", "") from None
    except FileNotFoundError:
        help = (
            f"`{path.stem}` alone is the shipped schedule" if path.stem in names() else "`schedc list` has the library"
        )
        raise _refusal("S122", f"there is no file {path}", help) from None
    except (OSError, ValueError) as error:
        raise _refusal("S122", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", "") from None


def open_schedule(argument: Given) -> ScheduleTree:
    """The checked tree of a shipped schedule or of a file; ``file.sched:name`` chooses one of several.

    For a plan, it is the schedule that the plan applies, with the plan's sizes as defaults.
    Raises `DiagnosticError` with the syntax errors (S0), or the faults of names and shapes (S1).
    """
    tree = open_named(argument)
    return tree.schedule if isinstance(tree, AppliedPlan) else tree


def open_named(argument: Given) -> ScheduleTree | AppliedPlan:
    """The checked schedule or plan of that name; see `open_schedule`. A plan's lines are not checked here."""
    source, wanted = _asked(argument)
    return _shipped(source, source.path, wanted) if source.path else _named(source, wanted)


@lru_cache(maxsize=64)
def _shipped(source: Source, _path: str, wanted: str | None) -> ScheduleTree | AppliedPlan:
    """The tree of a shipped text, which is read once per process. A text in two places has two trees."""
    return _named(source, wanted)


def _named(source: Source, wanted: str | None) -> ScheduleTree | AppliedPlan:
    try:
        file = parse(source)
    except DiagnosticError:
        if not _begins(source.text) and Path(source.name).suffix not in ("", _SUFFIX):
            message = f"{source.place} is no .sched file: it does not begin with `sched 1`, a schedule or a plan"
            costs = 'schema = "schedc.costs/' in source.text
            help = f"give {'it to --cost-file, beside ' * costs}a .sched file, or the name of a library schedule"
            raise _refusal("S122", message, help) from None
        raise
    tree = _choose(file, wanted, source)
    return applied(tree, file) if isinstance(tree, PlanTree) else checked(tree)


def _begins(text: str) -> bool:
    """Whether the first line that is no comment begins as files of the language do."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.split(maxsplit=1)[:1] in (["sched"], ["schedule"], ["plan"])


def _asked(argument: Given) -> tuple[Source, str | None]:
    """The text, and the name of the schedule or plan in it; None where no name was given."""
    argument = named(argument)
    if isinstance(argument, Text):
        return argument.source, argument.wanted or None
    place, colon, wanted = str(argument).rpartition(":")
    if colon and place.endswith(_SUFFIX):
        return load(place), wanted
    return load(argument), None


def _choose(file: FileTree, wanted: str | None, source: Source) -> ScheduleTree | PlanTree:
    """The tree of that name. Without a name, the only schedule, or the only plan of a file without schedules."""
    trees: Sequence[ScheduleTree | PlanTree] = [*file.schedules, *file.plans]
    if wanted is None:
        matches: Sequence[ScheduleTree | PlanTree] = file.schedules or file.plans
    else:
        matches = [tree for tree in trees if tree.name == wanted]
    if len(matches) == 1:
        return matches[0]
    tree_names = [tree.name for tree in trees]
    if wanted is not None and not matches:
        message = f"{source.place} holds no schedule `{wanted}`" + (", and no plan of that name" if file.plans else "")
        raise _refusal("S121", message, did_you_mean(wanted, tree_names))
    if wanted is not None:
        raise DiagnosticError([_twice(matches[1], source)])
    place = "/dev/stdin" if source.name == "<stdin>" else source.place
    help = f"choose one: {', '.join(f'{place}:{name}' for name in tree_names[:8])}"
    raise _refusal("S121", f"{source.place} holds {len(matches)} {'schedules' if file.schedules else 'plans'}", help)


def _twice(tree: ScheduleTree | PlanTree, source: Source) -> Diagnostic:
    return Diagnostic("S102", f"`{tree.name}` is defined twice", Label(tree.span, "again here"), source=source)


def applied(plan: PlanTree, file: FileTree) -> AppliedPlan:
    """The plan with its schedule, which is in the plan's file or else in the library.

    Raises `DiagnosticError`: S121 for an unknown schedule, S102, S111 and S113 for its sizes, those of the schedule.
    """
    schedule = _schedule_of(plan, file)
    if findings := _size_faults(plan, schedule):
        raise DiagnosticError(findings)
    values = {size.name: int(size.value) for size in plan.sizes}
    parameters = (replace(p, default=values.get(p.name, p.default)) for p in schedule.parameters)
    return AppliedPlan(plan.name, plan.doc or schedule.doc, plan, replace(schedule, parameters=tuple(parameters)))


def _schedule_of(plan: PlanTree, file: FileTree) -> ScheduleTree:
    """The checked schedule that a plan applies."""
    own = [tree for tree in file.schedules if tree.name == plan.schedule]
    if len(own) > 1:
        raise DiagnosticError([_twice(own[1], plan.source)])
    if own:
        return checked(own[0])
    if plan.schedule in names():
        return open_schedule(plan.schedule)
    choices = [*(tree.name for tree in file.schedules), *names()]
    message = f"there is no schedule `{plan.schedule}` in this file, nor in the library"
    help = did_you_mean(plan.schedule, choices) or "`schedc list` names the schedules of the library"
    raise DiagnosticError([Diagnostic("S121", message, Label(plan.schedule_span), help=help, source=plan.source)])


def _size_faults(plan: PlanTree, schedule: ScheduleTree) -> list[Diagnostic]:
    """What is wrong with the sizes that a plan gives, at their places in the plan."""
    roles = {parameter.name: parameter.role for parameter in schedule.parameters}
    findings: list[Diagnostic] = []
    seen: set[str] = set()
    for size in plan.sizes:
        code, message, help = "", "", ""
        least, largest = BOUNDS[roles.get(size.name, "count")]
        if size.name not in roles:
            code, message = "S111", f"`{schedule.name}` has no size `{size.name}`"
            help = did_you_mean(size.name, roles)
        elif size.name in seen:
            code, message, help = "S102", f"`{size.name}` is given twice", "keep one of the two"
        elif not least <= size.value <= largest:
            code, message = "S113", f"{size.name} = {size.value} is not between {least} and {largest:,}"
            help = "write a number between these two"
        seen.add(size.name)
        if code:
            findings.append(Diagnostic(code, message, Label(size.span), help=help, source=plan.source))
    return findings


def _refusal(code: str, message: str, help: str) -> RequestError:
    return RequestError([Diagnostic(code, message, Label(NOWHERE), help=help)])
