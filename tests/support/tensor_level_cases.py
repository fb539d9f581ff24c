"""Cases of recomputation beside tensor ranks: errors, bits and held bytes of every level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

from torch import nn

import schedc
from schedc.ir.plan import By, Level, Recompute
from schedc.plan import Method, Plan
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.stage.stage import Stage
from support.cell_orders import ORDERS, digest, in_each_order
from support.gradient_errors import error_of
from support.paths import ROOT
from support.tensor_cases import SCHEDULES, batch, family, loss_fn, reference, wide_norms
from support.tensor_expert_cases import KINDS, MESHES, expert_family, expert_reference

AHEAD = f"{ROOT}/examples/04_plan/recompute_bubbles.sched:recompute_1f1b"
"""A schedule whose Rs run ahead of the backwards; named ``ahead`` in cases."""


@contextmanager
def counting_held() -> Iterator[dict[int, int]]:
    """Bytes that a microbatch holds for its backward, by stage; of the last one."""
    counted: dict[int, int] = {}

    def noting(plain: Any) -> Any:
        def noted(self: Stage, microbatch: int, *args: Any, **options: Any) -> Any:
            counted[self.index] = held(self, microbatch).total
            return plain(self, microbatch, *args, **options)

        return noted

    with ExitStack() as patches:
        for name in ("begin_backward", "backward"):  # of a graph, and of one node
            patches.enter_context(mock.patch.object(Stage, name, noting(getattr(Stage, name))))
        yield counted


def levels(
    rank: int,
    world: int,
    name: str,
    schedules: Sequence[str],
    levels: Sequence[str] = tuple(Level),
    slices: int = 1,
    mesh: str = "",
    of_tokens: bool = False,
) -> list[dict[str, Any]]:
    """A case for each schedule: the error, digests by level and order of cells, and bytes held by level.

    Each level runs in two orders, the drawn one and another. levels: as of `_recompute`. slices: of a microbatch, or
    of its tokens. mesh: of `MESHES`; by default two tensor ranks, which share experts. again: of layers and
    microbatches, how many were recomputed, and how many were not, by adaptive level.
    """
    cases = []
    ranks = MESHES[mesh or ("ep 2 over tp 2" if name in KINDS else "ep 1, tp 2")]
    with wide_norms():
        model = expert_family(name, 0.01) if name in KINDS else family(name)
        for schedule in schedules:
            program = schedc.compile(
                AHEAD if schedule == "ahead" else schedule, P=ranks.pipeline, **SCHEDULES.get(schedule, {"M": 4})
            )
            cases.append(
                {"family": name, "schedule": schedule} | _case(model, program, levels, slices, ranks, of_tokens)
            )
    return cases


def _case(
    model: nn.Module, program: Any, levels: Sequence[str], slices: int, mesh: Mesh, of_tokens: bool
) -> dict[str, Any]:
    (tokens, labels), experts = batch(), mesh.experts > 1
    expected = expert_reference(model, tokens, labels, 4)[1] if experts else reference(model, tokens, labels, 4)[1]
    bits: dict[str, str] = {}
    bytes_held: dict[str, int] = {}
    again: dict[str, list[int]] = {}
    worst, cut_rows = 0.0, (slices,) * program.stages * (slices > 1)
    for number, level in enumerate(levels):
        recompute = (_recompute(level),) * program.stages
        way = {"method": Method.FLAT} if experts else {}
        plan = Plan(recompute=recompute, slices=cut_rows, slices_of_tokens=of_tokens, **way)
        pipe = Pipeline(
            deepcopy(model), program, loss_fn=loss_fn, mesh=mesh, cut=Cut(inputs=["input_ids"]), plan=plan,
            example={"input_ids": tokens[:2]}, timeout=60.0,
        )  # fmt: skip
        for stage in pipe.held(pipe.places[0]):
            stage.set_recomputation(recompute[0], count=True)
        for order in in_each_order(pipe, dict.fromkeys(("drawn", list(ORDERS)[number % len(ORDERS)]))):
            with counting_held() as counted:
                for _ in range(1 + ("adaptive" in level)):  # the first step decides for the second
                    pipe.zero_grad()
                    pipe.step({"input_ids": tokens}, labels)
            bits[f"{level} {order}"] = digest(pipe)
            bytes_held[level] = counted[min(counted)]
            worst = max(worst, error_of(pipe, expected))
        decided = [stage.recomputation.adaptive for stage in pipe.held(pipe.places[0])]
        again[level] = [sum(getattr(each, kind) for each in decided if each) for kind in ("recomputed", "held")]
        pipe.close()
    return {"error": worst, "equal": len(set(bits.values())) == 1, "bits": bits, "held": bytes_held, "again": again}


def _recompute(text: str) -> Recompute:
    """``full``: of all layers. ``act 1 full 1``: of single layers. ``medium adaptive 1.1 group``: by rows of ranks."""
    words = text.split()
    if words[1:2] == ["adaptive"]:
        return Recompute(Level(words[0]), float(words[2]), By(words[3]))
    runs = [(Level(level), int(count)) for level, count in zip(words[:-1:2], words[1::2], strict=True)]
    return Recompute.of_layers(runs) if runs else Recompute(Level(text))
