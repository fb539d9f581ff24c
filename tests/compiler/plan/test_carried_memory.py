"""What segments of a sequence hold beside activations, against the rows that a run keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedc.compiler import analyse
from schedc.ir.ops import OpKind
from schedc.load.library import Text
from schedc.plan.carried_memory import carried_memory
from schedc.report.check import to_json
from schedc.source import Source
from support.needs import needed

LINES = "layers 4 dense 4\n  block hidden 32 heads 4 head 8 inner 64{latent}\n  tokens 16 dtype fp32\n  memory 1 MB"


def _step(segments: int, latent: str = "", order: str = "seq1f1b") -> Any:
    lines = LINES.format(latent=latent)
    sizes = "P = 2, M = 2" + f", k = {segments}" * (order == "seq1f1b")
    text = f"sched 1\nplan p = {order}({sizes}) {{\n  {lines}\n}}\n"
    return analyse(Text(Source("p.sched", text)), {})


@pytest.mark.parametrize("segments", [2, 4])
def test_the_term_is_the_rows_of_a_run(segments: int) -> None:
    """Keys and values of 2 layers, of 16 tokens with 32 columns in 4 bytes, less those that activations count."""
    torch = needed("torch")
    from schedc_runtime.stage.carries import Carries

    step = _step(segments)
    added = carried_memory(step.plan, step.layout, step.schedule)
    carries, joined, total, in_flight = Carries(0, segments), {}, 0.0, 0
    for row in range(int(step.schedule.rank_start[1])):
        number, forward = int(step.schedule.microbatch[row]), step.schedule.kind[row] == OpKind.F
        if forward:
            carries.begin(number)
            own = [torch.zeros(1, 4, 16, 8, requires_grad=True) for _ in range(4)]
            joined[number] = [carries.joined(str(name), each, 2) for name, each in enumerate(own)]
        else:
            for each in joined.pop(number):
                each.sum().backward()
        total, in_flight = total + added[row], in_flight + (1 if forward else -1)
        assert carries.held_bytes == total + in_flight * 4 * 16 * 32 * 4, step.schedule.describe(row)
    carries.end()
    assert np.isclose(added[: row + 1].sum(), 0)


def test_latents_are_carried_and_made_again() -> None:
    """A latent of 12 and 4 rotated columns; keys of 12 and values of 8 columns in each of 4 heads."""
    step = _step(4, " latent 12 rotary 4")
    schedule, added = step.schedule, carried_memory(step.plan, step.layout, step.schedule)
    latents, pairs = 2 * 16 * (12 + 4) * 4, 2 * 16 * 4 * (8 + 4 + 8) * 4
    first = schedule.stage == 0
    by_op = {
        (OpKind(kind), number): change
        for kind, number, change in zip(schedule.kind[first], schedule.microbatch[first], added[first], strict=True)
    }
    assert [by_op[OpKind.F, j] for j in range(4)] == [3 * latents, *(j * pairs - latents for j in (1, 2, 3))]
    assert [by_op[OpKind.B, j] for j in (3, 2, 1, 0)] == [
        4 * latents - 3 * pairs, latents - 2 * pairs, latents - pairs, -6 * latents
    ]  # fmt: skip


def test_the_peak_of_a_plan_has_it() -> None:
    step = _step(4)
    without = replace(step.held, carried=np.zeros(len(step.schedule)))
    peaks = to_json(step)["peak_memory"]
    assert peaks == pytest.approx(step.held.peaks().tolist())
    assert (step.held.peaks() - without.peaks() >= 3 * 2 * 16 * 2 * 32 * 4).all()  # room for the rest of a sequence
    assert not carried_memory(step.plan, step.layout, _step(1, order="1f1b").schedule).any()
