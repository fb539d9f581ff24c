"""The text about values at which another plan is as fast: nearest first, plans of one value on one line."""

from __future__ import annotations

from typing import Any

import pytest

from schedc.report.sliders import to_text, with_prefix


def tie(plan: int, value: float, now: float, widths: float | None, step: float = 18.2) -> dict[str, Any]:
    return {"plan": f"{plan:02}.sched", "value": value, "widths": widths, "times": value / now, "step_s": step}


def setting(name: str, unit: str, value: float, width: float | None, *ties: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "unit": unit, "says": "", "value": value, "width": width, "ties": list(ties)}


SLIDERS = {
    "plans": ["01.sched", "02.sched", "03.sched", "04.sched"],
    "equal": ["04.sched"],
    "settings": [
        setting("grouped", "of peak", 0.44, 0.1, tie(2, 0.38, 0.44, -0.6), tie(3, 0.38, 0.44, -0.6)),
        setting("launch", "s", 1.2e-3, 0.2, tie(3, 1.3e-3, 1.2e-3, 0.4), tie(2, 2e-3, 1.2e-3, 2.5)),
        setting("gemm", "of peak", 0.8, 0.1),
        setting("rail.Bps", "B/s", 50e9, None, tie(2, 200e9, 50e9, None), tie(3, 40e9, 50e9, None)),
        setting("device.usable", "", 0.92, None, tie(3, 0.9, 0.92, None)),
    ],
    "no_effect": ["cp", "fp8"],
}


def test_ties_stand_by_how_far_they_are() -> None:
    assert (
        "\n".join(to_text(SLIDERS))
        == """\
where one of these plans is as fast as 01, with all else as it is; other plans are not priced again
  as fast as 01 anyway: 04
  constant           now         there  widths  plans
  launch          1.2 ms        1.3 ms    +0.4  03 at 18.20 s
  grouped   0.44 of peak  0.38 of peak    -0.6  02, 03 at 18.20 s
  launch          1.2 ms          2 ms    +2.5  02 at 18.20 s
  cluster            now     there   times  plans
  device.usable     0.92       0.9  x0.978  03 at 18.20 s, 01 fits no more
  rail.Bps       50 GB/s   40 GB/s    x0.8  03 at 18.20 s
  rail.Bps       50 GB/s  200 GB/s      x4  02 at 18.20 s
  no other plan is as fast within 3 widths, or from x0.1 to x10, of: gemm
  without effect on these plans: cp, fp8"""
    )


def test_many_ties_are_cut_and_said() -> None:
    many = [setting(f"constant{i}", "", 1.0, 0.1, tie(2, 1.1, 1.0, 0.1 * i)) for i in range(13)]
    lines = list(to_text(SLIDERS | {"settings": many}))
    assert lines[-2] == "  and 3 further lines; --json has all"
    assert all(len(line) <= 100 for line in lines)
    alone = list(to_text({"plans": ["01.sched"], "equal": [], "settings": [], "no_effect": []}))
    assert alone == ["sliders: 01 is the only plan, so no other one can be as fast"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(2e-6, "s", "2 us"), (4e-8, "s", "40 ns"), (0.5, "s", "500 ms"), (3.35e12, "B/s", "3.35 TB/s"), (8, "", "8")],
)
def test_quantities_have_units(value: float, unit: str, text: str) -> None:
    assert with_prefix(value, unit) == text
