"""Gradients that are NaN or infinite: refused by the step that made them, on every rank, before any update.

Each rank adds one number per device and type to the exchange of the loss: it is finite if all gradients there are.
Only where such a number is not finite do ranks look at single gradients, and tell each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from schedc.ir.program import InstructionKind, Program
from schedc_runtime.data_parallel.mixed_lists import alike, here
from schedc_runtime.errors import NonFiniteGradients, RuntimeFault
from schedc_runtime.execute.instruction_names import instruction_label
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.step.call import CheckFinite, PipelineCall

_grad, _is_sparse = attrgetter("grad"), attrgetter("is_sparse")
_is_there: Any = partial(is_not, None)


class BadGradient(NamedTuple):
    """A gradient with a value that is not finite, and the rank and stage that hold it."""

    stage: int
    rank: str
    name: str


class GradientCheck:
    """The check of the gradients of one pipeline. check_finite: ``"loss"`` leaves gradients to the trainer.

    A call with a ``scale`` ends the check: a gradient scaler expects gradients that are not finite, and skips the
    update. Its scale may pass 1 later.
    """

    def __init__(self, assembly: Assembly, check_finite: CheckFinite) -> None:
        if not (isinstance(check_finite, bool) or check_finite == "loss"):
            raise RuntimeFault(f"Pipeline(check_finite={check_finite!r})", 'give True, False or "loss"')
        self._assembly, self._active = assembly, check_finite is True

    def sums(self, call: PipelineCall) -> list[Tensor]:
        """[devices and types] a number of the gradients here, [] each, still on its device."""
        if not call.training or not self._active or call.scale != 1.0:
            self._active &= not call.training or call.scale == 1.0
            return []
        held = [p for stage in self._assembly.held() for p in stage.tree.parameters()]
        grads = list(filter(_is_there, map(_grad, held)))
        parts = _with_values(list(dict(zip(map(id, grads), grads, strict=True)).values()))
        with torch.no_grad():
            return [_sum_of([parts[place] for place in places]) for places in alike(parts)]

    def refuse(self, everyone: Sequence[Any], program: Program) -> None:
        """Raise `NonFiniteGradients`, on every rank, if a gradient of any rank is not finite.

        everyone: what `gathered` gave. Finite numbers whose sum overflows are let pass.
        """
        if not any(part["spoilt"] for part in everyone):
            return
        mine = [[stage, rank, name] for stage, rank, name, part in self._parts() if not bool(part.isfinite().all())]
        told = self._assembly.guard.control.fold("naming gradients that are not finite", mine or None, _joined)
        if bad := [BadGradient(*each) for each in told]:
            last = max(each.stage for each in bad)
            raise NonFiniteGradients(_words(program, bad, last), last, sorted({x.name for x in bad if x.stage == last}))

    def _parts(self) -> Iterator[tuple[int, str, str, Tensor]]:
        """Stage, rank, name and values [...] of the gradients here."""
        assembly = self._assembly
        for place in assembly.places:
            for index, stage in sorted(assembly.stages[place].items()):
                for name, parameter in stage.module.named_parameters():
                    if parameter.grad is not None:
                        yield index, assembly.mesh.name(place), name, _plain(parameter.grad)


def _with_values(gradients: Sequence[Tensor]) -> list[Tensor]:
    """What lies here of gradients [...], where it is not empty. Whole dense ones take no call of Python each."""
    dense = {Tensor}.issuperset(map(type, gradients)) and True not in map(_is_sparse, gradients)
    return list(filter(Tensor.numel, gradients if dense else map(_plain, gradients)))


def _plain(gradient: Tensor) -> Tensor:
    """[...] the values that lie here: of a shard, and of a sparse gradient."""
    return gradient._values() if gradient.is_sparse else here(gradient) if type(gradient) is not Tensor else gradient


def _sum_of(parts: Sequence[Tensor]) -> Tensor:
    """[] a number that is finite if all values of ``parts`` are, unless it overflows: the sum of their norms."""
    narrow = parts[0].dtype.itemsize < 4
    norms = torch._foreach_norm(list(parts), 2.0, dtype=torch.float32 if narrow else None)
    return torch.stack(list(norms)).sum()


def _joined(everyone: Sequence[Any]) -> list[Any]:
    return [each for part in everyone if part is not None for each in part]


def _words(program: Program, bad: Sequence[BadGradient], last: int) -> str:
    """What is known of the cause. last: the last stage with such gradients, which comes first in a backward."""
    own = [each for each in bad if each.stage == last]
    names, ranks = list(dict.fromkeys(x.name for x in own)), list(dict.fromkeys(x.rank for x in own))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    passed_on = any(each.stage == last - 1 for each in bad)
    rows = _rows(program, last, passed_on)
    first, place = instruction_label(program, rows[0]), program.where(rows[0])
    at = first if len(rows) == 1 else f"one of {len(rows)} instructions from {first} on"
    return (
        f"a gradient is NaN or infinite: that of `{names[-1]}`{more}, stage {last}, on {' and '.join(ranks)}\n"
        f"  made at {at} --> {place}" + "; earlier stages have such gradients, too" * passed_on
    )


def _rows(program: Program, stage: int, passed_on: bool) -> list[int]:
    """The instructions of a stage that can have made a bad gradient. passed_on: the stage before has one, too.

    A weight gradient alone does not travel: then it was a W, where a W is apart. In the first stage nothing tells.
    """
    full, half, weights = InstructionKind.B, InstructionKind.I, InstructionKind.W
    kinds = {full, half} if passed_on else {full, weights} if stage else {full, half, weights}
    own = (program.stage == stage) & np.isin(program.kind, [int(kind) for kind in kinds])
    cells = (program.stage2 == stage) & (program.kind == InstructionKind.CELL)
    return [int(row) for row in np.flatnonzero(own | cells)]
