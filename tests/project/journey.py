"""Counts how often a task changes folders of the compiler, by the calls of its functions.

    python tests/project/journey.py compile:source

A journey is the list of functions of `schedc` by their first call: loops and repeated calls do not lengthen it.
A *stay* is a part of the list in one folder. A *climb* is a step to a stay whose folder stands later in the order of
rooms: the task comes back from a used room to a using room. Few stays mean that one reads the task folder by folder.
Imports and caches are warm. The tool uses stable interfaces alone, so that it runs on old commits too: copy it there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

PLAN = """sched 1
plan mine = dualpipev(P = 4, M = 8) {
  layers 16 dense 3
  experts 64 top 8
  topology nodes 2 x 4
  alltoall hierarchical
  overlap auto
  recompute layer
}
"""


class Journey(NamedTuple):
    """folders: [stays] where the functions lie. climbs: steps to a folder that stands later in the order."""

    folders: tuple[str, ...]
    climbs: int


def travelled(folders: Sequence[str], order: Sequence[str]) -> Journey:
    """The journey of functions in these folders, by their first call. order: rooms, lowest first; others come last."""
    stays = [folder for before, folder in pairwise(("", *folders)) if folder != before]
    place: Mapping[str, int] = {room: number for number, room in enumerate(order)}
    height = [place.get(folder, len(order)) for folder in stays]
    return Journey(tuple(stays), sum(after > before for before, after in pairwise(height)))


def called(run: Callable[[], object], package: Path) -> list[str]:
    """[functions] folder of each function of a package that ``run`` calls, in the order of first calls."""
    first: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            first.setdefault(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    paths = [Path(code.co_filename) for code in first]
    inside = [path.relative_to(package) for path in paths if path.is_relative_to(package)]
    return [path.parts[0].removesuffix(".py") for path in inside]


def compile_source(folder: Path) -> Callable[[], object]:
    """Compiles a schedule with a plan from its text."""
    import schedc

    path = folder / "mine.sched"
    path.write_text(PLAN, encoding="utf-8")
    return lambda: schedc.compile(str(path))


TASKS: Mapping[str, Callable[[Path], Callable[[], object]]] = {"compile:source": compile_source}


def main() -> int:
    """Print the stays and climbs of a task."""
    from room_order import ROOMS

    import schedc

    if len(sys.argv) != 2 or sys.argv[1] not in TASKS:
        print(f"usage: python tests/project/journey.py {'|'.join(TASKS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        run = TASKS[sys.argv[1]](Path(folder))
        run()
        journey = travelled(called(run, Path(schedc.__file__).parent), ROOMS["schedc"])
    print(" ".join(journey.folders))
    print(f"{len(journey.folders)} stays, {journey.climbs} climbs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
