"""The schedules that a space offers, read when they are first asked for: a space without a plan rarely needs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedc.planner.space.schedules import LeftOut, ScheduleChoice


@dataclass(frozen=True, eq=False)
class OfferedSchedules:
    """The schedules of the library, and of the `.sched` files in ``folder``."""

    folder: Path | None = None

    @cached_property
    def _read(self) -> tuple[tuple[ScheduleChoice, ...], tuple[LeftOut, ...]]:
        """What `all_schedules` says. The compiler of schedules is imported here, which takes as long as reading."""
        from schedc.planner.space.schedules import all_schedules

        return all_schedules(self.folder)

    @property
    def choices(self) -> tuple[ScheduleChoice, ...]:
        """Those that plans may use."""
        return self._read[0]

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Those that no plan can use."""
        return self._read[1]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `choices`."""
        return tuple(choice.name for choice in self.choices)
