"""The options --snapshot and --copy-speed: the state that each rank copies to the host beside a step."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import click

from schedc.units import UNITS, bytes_of, speed_of

F = TypeVar("F", bound=Callable[..., Any])

_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z/]+)")


class GivenSnapshot(NamedTuple):
    """bytes: of the state of each rank. speed: bytes per second that a rank copies to the host."""

    bytes: float
    speed: float


class _Amount(click.ParamType[float]):
    """A number with a unit. read: gives its value; None for a unit of something else."""

    def __init__(self, name: str, example: str, read: Callable[[float, str], float | None]) -> None:
        self.name, self.example, self.read = name, example, read

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = _AMOUNT.fullmatch(str(value).strip())
        amount = self.read(float(match[1]), match[2]) if match else None
        if amount is None or not 0 < amount < float("inf"):
            per = "/s" * self.example.endswith("/s")
            units = ", ".join(f"{unit}{per}" for unit in UNITS if self.read(1.0, f"{unit}{per}") is not None)
            self.fail(f"{value!r} is no {self.name}: write it as `{self.example}`, in {units}", param, ctx)
        return amount


def snapshot_arguments(command: F) -> F:
    """Adds both options; the command gets ``snapshot``, a `GivenSnapshot` or None."""

    @wraps(command)
    def with_snapshot(*, snapshot: float | None, copy_speed: float | None, **rest: Any) -> Any:
        if (snapshot is None) != (copy_speed is None):
            raise click.UsageError(
                "--snapshot and --copy-speed go together: the size of a state, and how fast it leaves"
            )
        given = None if snapshot is None or copy_speed is None else GivenSnapshot(snapshot, copy_speed)
        return command(snapshot=given, **rest)

    size = click.option(
        "--snapshot",
        metavar="SIZE",
        type=_Amount("size", "10.5GB", bytes_of),
        help="Price a copy of so large a state of each rank to the host, in pieces beside the step. Times of the costs "
        "are then milliseconds. Needs --copy-speed.",
    )
    speed = click.option(
        "--copy-speed",
        metavar="SPEED",
        type=_Amount("speed", "20GB/s", speed_of),
        help="How fast a rank copies to the host.",
    )
    return size(speed(with_snapshot))  # type: ignore[return-value]
