"""Cases of recomputation beside tensor ranks: errors, bits and held bytes of every level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

from torch import nn

import schedc
from schedc.ir.plan import Level, Recompute
from schedc.plan import Method, Plan
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.stage.stage import Stage
from support.cell_orders import ORDERS, digest, in_each_order
from support.gradient_errors import error_of
from support.paths import ROOT
from support.tensor_cases import SCHEDULES, batch, family, loss_fn, reference, wide_norms
from support.tensor_expert_cases import KINDS, expert_family, expert_reference

AHEAD = f"{ROOT}/examples/04_plan/recompute_bubbles.sched:recompute_1f1b"
"""A schedule whose Rs run ahead of the backwards; named ``ahead`` in cases."""


@contextmanager
def _counting() -> Iterator[dict[int, int]]:
    """Bytes that a microbatch holds for its backward, by stage; of the last one."""
    counted: dict[int, int] = {}
    plain = Stage.begin_backward

    def begin_backward(self: Stage, microbatch: int, *args: Any) -> None:
        counted[self.index] = held(self, microbatch).total
        plain(self, microbatch, *args)

    with mock.patch.object(Stage, "begin_backward", begin_backward):
        yield counted


def levels(
    rank: int, world: int, name: str, schedules: Sequence[str], levels: Sequence[str] = tuple(Level), slices: int = 1
) -> list[dict[str, Any]]:
    """A case for each schedule: the error, digests by level and order of cells, and bytes held by level.

    Each level runs in two orders, the drawn one and another. slices: of a microbatch.
    """
    cases = []
    with wide_norms():
        model = expert_family(name, 0.01) if name in KINDS else family(name)
        for schedule in schedules:
            program = schedc.compile(
                AHEAD if schedule == "ahead" else schedule, P=2, **SCHEDULES.get(schedule, {"M": 4})
            )
            cases.append({"family": name, "schedule": schedule} | _case(model, program, levels, slices, name in KINDS))
    return cases


def _case(model: nn.Module, program: Any, levels: Sequence[str], slices: int, experts: bool) -> dict[str, Any]:
    tokens, labels = batch()
    expected = expert_reference(model, tokens, labels, 4)[1] if experts else reference(model, tokens, labels, 4)[1]
    bits: dict[str, str] = {}
    bytes_held: dict[str, int] = {}
    worst = 0.0
    mesh, cut_rows = Mesh(2, experts=2 if experts else 1, tensor=2), (slices,) * program.stages * (slices > 1)
    for number, level in enumerate(levels):
        recompute = (Recompute(Level(level)),) * program.stages
        plan = Plan(recompute=recompute, slices=cut_rows, **({"method": Method.FLAT} if experts else {}))
        pipe = Pipeline(
            deepcopy(model), program, loss_fn=loss_fn, mesh=mesh, cut=Cut(inputs=["input_ids"]), plan=plan,
            example={"input_ids": tokens[:2]}, timeout=60.0,
        )  # fmt: skip
        for stage in pipe.held(pipe.places[0]):
            stage.set_recomputation(recompute[0], count=True)
            stage.prepare_recompute()
        for order in in_each_order(pipe, dict.fromkeys(("drawn", list(ORDERS)[number % len(ORDERS)]))):
            with _counting() as counted:
                pipe.step({"input_ids": tokens}, labels)
            bits[f"{level} {order}"] = digest(pipe)
            bytes_held[level] = counted[min(counted)]
            worst = max(worst, error_of(pipe, expected))
        pipe.close()
    return {"error": worst, "equal": len(set(bits.values())) == 1, "bits": bits, "held": bytes_held}


def refused_levels(rank: int, world: int) -> list[str]:
    """What pipelines say of recomputation that they do not carry out beside tensor ranks."""
    said = []
    adaptive, single = Recompute(Level.MEDIUM, 2.0), Recompute.of_layers([(Level.FULL, 1)])
    for recompute in (adaptive, single):
        try:
            Pipeline(
                family("llama"), schedc.compile("1f1b", P=2, M=4), loss_fn=loss_fn, mesh=Mesh(2, tensor=2),
                plan=Plan(recompute=(recompute, recompute)),
            )  # fmt: skip
        except RuntimeFault as fault:
            said.append(str(fault))
    return said
