"""``host 200 GB at 50 GB/s shared by 8``: host memory of a rank, the speeds of its lanes, and who shares them."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.ir.contradictions import HOST_REMEDY
from schedc.ir.plan import Host, Plan
from schedc.plan.directives.base import Directive, Reading
from schedc.syntax.plan import GivenValue, HostLine, Word
from schedc.units import bytes_of, digits, exact_unit, speed_of

_LANES = {"d2h": "out", "h2d": "back"}


def _read(reading: Reading, line: HostLine) -> None:
    in_bytes = bool(line.size.unit)
    size = bytes_of(line.size.value, line.size.unit) if in_bytes else float(line.size.value)
    if size is None:
        reading.fault(
            "S146", f"`{line.size.unit}` is no unit of memory", line.size.span, "write KB to TB, or KiB to TiB"
        )
        return
    speeds: dict[str, float] = {}
    shared = 0
    for entry in line.speeds:
        if not reading.word(Word(entry.name, entry.span), ("at", *_LANES, "shared"), "part of `host`"):
            return
        if entry.name == "shared":
            if shared or entry.unit != "by" or entry.value < 1:
                reading.fault(
                    "S146", "ranks that share the lanes are no number", entry.span, "write `shared by 8` once"
                )
                return
            shared = int(entry.value)
            continue
        speed = _speed(entry, in_bytes)
        if speed is None:
            help = f"write `{entry.name} 50 GB/s`" if in_bytes else f"write `{entry.name} 2`: memory per unit of time"
            reading.fault("S146", f"`{entry.name}` without a speed", entry.span, help)
            return
        for field in _LANES.values() if entry.name == "at" else (_LANES[entry.name],):
            if field in speeds:
                reading.fault("S144", "the speed of a lane is said twice", entry.span, HOST_REMEDY)
                return
            speeds[field] = speed
    if len(speeds) < len(_LANES):
        reading.fault("S146", "host memory without the speeds of its lanes", line.span, HOST_REMEDY)
        return
    reading.give(host=Host(size, **speeds, in_bytes=in_bytes, shared=shared or 1))


def _speed(entry: GivenValue, in_bytes: bool) -> float | None:
    speed = speed_of(entry.value, entry.unit) if in_bytes else None if entry.unit else float(entry.value)
    return speed if speed and speed > 0 else None


def _write(plan: Plan) -> Iterator[str]:
    if (host := plan.host) is not None:
        write = exact_unit if host.in_bytes else digits
        per = "/s" * host.in_bytes
        lanes = f"d2h {write(host.out)}{per} h2d {write(host.back)}{per}"
        lanes = lanes if host.out != host.back else f"at {write(host.out)}{per}"
        yield f"host {write(host.size)} {lanes}{f' shared by {host.shared}' if host.shared > 1 else ''}"


def _check_lines(reading: Reading) -> None:
    """S146: the host's memory is in bytes and the device's is not, or the other way round."""
    host, memory = reading.plan.host, reading.tree.memory
    if host is not None and memory is not None and host.in_bytes != bool(memory.unit):
        message = "the host's memory has a unit, and the memory of the ranks has none"
        message = message if host.in_bytes else "the host's memory has no unit, and the memory of the ranks has one"
        reading.fault("S146", message, reading.span("host"), "give units to both, or to neither")


DIRECTIVE = Directive("host", _read, _write, check_lines=_check_lines)
