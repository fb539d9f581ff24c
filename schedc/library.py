"""Finding schedules: those that ship with schedc by name, others by path."""

from __future__ import annotations

from pathlib import Path

from schedc.check import check
from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.source import NOWHERE, Source
from schedc.syntax.parser import parse
from schedc.syntax.tokens import MAX_FILE
from schedc.syntax.tree import ScheduleTree

_SUFFIX = ".sched"


def _folder() -> Path:
    """Where the shipped schedules lie: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "schedules"
    return installed if installed.is_dir() else package.parent / "schedules"


def names() -> list[str]:
    """The names of the shipped schedules."""
    return sorted(path.stem for path in _folder().glob(f"*{_SUFFIX}"))


def load(name_or_path: str | Path) -> Source:
    """The text of a shipped schedule, or of the file at a path. Raises `DiagnosticError` (S121, S122).

    ``dualpipev`` is always the shipped one, ``dualpipev.sched`` only where there is no such file.
    """
    given = str(name_or_path)
    path = Path(given)
    if given in names() or (given.removesuffix(_SUFFIX) in names() and not path.exists()):
        shipped = _folder() / f"{given.removesuffix(_SUFFIX)}{_SUFFIX}"
        return Source(shipped.name, _read(shipped))
    if path.suffix == _SUFFIX or path.is_file():
        return Source(given, _read(path))
    help = did_you_mean(given, names()) or "`schedc list` names the schedules of the library"
    raise _refusal("S121", f"there is no schedule `{given}` in the library, nor a file of that name", help)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE + 1)  # one byte more than legal: the parser then refuses it
        return raw[:MAX_FILE].decode("utf-8") if len(raw) <= MAX_FILE else raw.decode("utf-8", errors="replace")
    except UnicodeDecodeError as error:
        raise _refusal("S122", f"{path} is not UTF-8 text (byte {error.start})", "") from None
    except FileNotFoundError:
        help = f"`{path.stem}` alone is the shipped schedule" if path.stem in names() else ""
        raise _refusal("S122", f"there is no file {path}", help) from None
    except (OSError, ValueError) as error:
        raise _refusal("S122", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", "") from None


def open_schedule(name_or_path: str | Path) -> ScheduleTree:
    """The checked tree of a shipped schedule or of a file; ``file.sched:name`` chooses one of several.

    Raises `DiagnosticError` with the syntax errors (S0), or the faults of names and shapes (S1).
    """
    given = str(name_or_path)
    place, colon, wanted = given.rpartition(":")
    chosen = bool(colon) and place.endswith(_SUFFIX)
    source = load(place if chosen else given)
    tree = _choose(parse(source).schedules, wanted if chosen else None, source)
    if findings := check(tree):
        raise DiagnosticError(findings)
    return tree


def _choose(trees: tuple[ScheduleTree, ...], wanted: str | None, source: Source) -> ScheduleTree:
    found = [tree for tree in trees if wanted is None or tree.name == wanted]
    if len(found) == 1:
        return found[0]
    known = [tree.name for tree in trees]
    if wanted is not None and not found:
        raise _refusal("S121", f"{source.name} holds no schedule `{wanted}`", did_you_mean(wanted, known))
    if wanted is not None:
        label = Label(found[1].span, "again here")
        raise DiagnosticError([Diagnostic("S102", f"`{wanted}` is defined twice", label, source=source)])
    help = f"choose one: {', '.join(f'{source.name}:{name}' for name in known[:8])}"
    raise _refusal("S121", f"{source.name} holds {len(known)} schedules", help)


def _refusal(code: str, message: str, help: str) -> DiagnosticError:
    return DiagnosticError([Diagnostic(code, message, Label(NOWHERE), help=help)])
