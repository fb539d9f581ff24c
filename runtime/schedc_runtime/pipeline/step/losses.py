"""The end of a step: the loss and what else was formed, on every rank, and which stage made it NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedc_runtime.device.choice import HostCopy
from schedc_runtime.errors import NonFiniteLoss
from schedc_runtime.execute.executor import Executor
from schedc_runtime.moe.sizes import Marks, check_flags
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.pipeline.build.loss_function import Formed
from schedc_runtime.ranks.control import ControlPlane


class Leftovers(Exception):
    """A program ended before everything that it produced was used; the compiler makes no such program."""


class CountRefused(BatchRefused):
    """The loss function has counted other targets than were counted before the step. Every rank raises the same."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a step or an evaluation, on every rank.

    loss: [] over all microbatches and replicas: the mean over what `Loss` counts, else over microbatches.
    losses: [replicas * M] means of each microbatch; those of replica r from r * M on.
    count: number of targets, or of microbatches under a scalar loss.
    metrics: each metric of `Loss` summed over all microbatches and replicas, and divided by ``count``.
    outputs: [rows, ...] the model's, for the microbatches of this process's last stages, without repeated rows. None
        on ranks without a last stage, and where nobody asked for outputs. Of a list of microbatches, a list.
    microbatches: numbers of the microbatches that ``outputs`` has, ascending.
    """

    loss: Tensor
    losses: Tensor
    count: float
    metrics: dict[str, float]
    outputs: Any = None
    microbatches: tuple[int, ...] = ()


def share(
    control: ControlPlane,
    everyone: Sequence[Any],
    executors: Sequence[Executor],
    replicas: int,
    *,
    check_finite: bool,
    count: float | None = None,
    losses: int = 1,
) -> tuple[StepResult, bool]:
    """(losses of all ranks on the CPU, without outputs; whether they are of `Loss`). The same bits on every rank.

    everyone: what `gathered` gave. executors: the executors of this process in the ending step. count: number of
    targets that the gradients were weighed with, if any. losses: number of stages that form one for each microbatch.

    Raises, on every rank, `NonFiniteLoss` if ``check_finite``, `BatchRefused` where no rank
    formed a loss, and `CountRefused` for another count than ``count``.
    """
    program = executors[0].program
    values = {int(number): value for part in everyone for number, value in part["formed"].items()}
    dtype = next((part["dtype"] for part in everyone if part["dtype"]), "")
    if not dtype:
        raise BatchRefused("no rank formed a loss: no targets were given", "pass targets")
    if missing := sorted(set(range(program.microbatches * replicas * losses)) - values.keys()):
        raise Leftovers(f"the program formed no loss for the microbatches {sorted({x // losses for x in missing})}")
    values = _added(values, losses, getattr(torch, dtype))
    shared, counted = _joined([values[number] for number in sorted(values)], getattr(torch, dtype), count)
    if check_finite and not math.isfinite(shared.loss):
        microbatch, stage = _culprit(control, {m: value[0] for m, value in values.items()}, executors)
        raise NonFiniteLoss(float(shared.loss), microbatch, stage, program.stages)
    return shared, counted


def _added(values: Mapping[int, Any], losses: int, dtype: torch.dtype) -> dict[int, Any]:
    """By number of the microbatch: what was formed, with the losses of its outputs added in their order."""
    if losses == 1:
        return dict(values)
    added = {}
    for number in range(len(values) // losses):
        own = [torch.tensor(values[number * losses + output][0], dtype=dtype) for output in range(losses)]
        added[number] = [float(reduce(torch.add, own)), *values[number * losses][1:]]
    return added


def gathered(
    control: ControlPlane,
    formed: Mapping[int, Formed],
    flags: Iterable[tuple[str, Tensor]],
    sums: Sequence[Tensor] = (),
) -> tuple[list[Any], Marks]:
    """What every rank formed, and the flags of all MoE layers. A collective; the device is waited for once.

    formed: as of `LossHead`; microbatches of replica r are those from ``r * microbatches`` on. flags: layer and
    microbatch, and [ranks of its expert group] `Flag`s that are still on the device. sums: as of `GradientCheck.sums`.
    Raises `RoutingFault`, on every rank, for a flag that is an error.
    """
    mine = _on_host(formed, list(flags), sums)
    everyone: list[Any] = control.fold("the end of the step, to share the loss", mine, _told)
    marks = [(where, values) for part in everyone for where, values in part["flags"]]
    for where, values in marks:
        check_flags(values, where)
    return everyone, marks


def _told(everyone: Sequence[Any]) -> list[Any]:
    """Those that formed a loss, or have flags or gradients that are not finite."""
    return [each for each in everyone if each is not None]


def _on_host(
    formed: Mapping[int, Formed], flags: Sequence[tuple[str, Tensor]], sums: Sequence[Tensor]
) -> dict[str, Any] | None:
    """What was formed here as JSON, which holds a float of any of torch's dtypes exactly. One copy to the host.

    None if there is nothing to tell.
    """
    own = [each.sum for each in formed.values()]
    others = [value for each in formed.values() if each.counted for value in (each.targets, *each.metrics.values())]
    scalars = [*own, *sums, *(value for value in others if isinstance(value, Tensor))]
    copied = iter(_copied(scalars, [values for _, values in flags]))
    totals, norms = [next(copied) for _ in own], [next(copied) for _ in sums]
    plain = iter([next(copied) if isinstance(value, Tensor) else float(value) for value in others])
    facts = {
        "dtype": str(own[0].dtype).removeprefix("torch.") if own else "",
        "formed": {
            number: [total, next(plain), {name: next(plain) for name in each.metrics}, True]
            if each.counted
            else [total, 1.0, {}, False]
            for (number, each), total in zip(formed.items(), totals, strict=True)
        },
    }
    spoilt = not all(map(math.isfinite, norms))
    marks = [(where, [int(next(copied)) for _ in range(len(values))]) for where, values in flags]
    raised = [(where, values) for where, values in marks if any(values)]
    return facts | {"flags": raised, "spoilt": spoilt} if formed or raised or spoilt else None


def _copied(scalars: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[float]:
    """The values of ``scalars`` [] and then of ``vectors`` [any] in float64: a launch or two for each dtype."""
    dtypes = dict.fromkeys([scalar.dtype for scalar in scalars])
    if len(dtypes) == 1 and not vectors and scalars[0].is_floating_point():  # a float of Python has all their values
        return list(HostCopy(torch.stack(list(scalars))).join().tolist())
    by_dtype = [[place for place, scalar in enumerate(scalars) if scalar.dtype is dtype] for dtype in dtypes]
    parts = [torch.stack([scalars[place] for place in places]).to(torch.float64) for places in by_dtype]
    parts += [torch.cat(list(vectors)).to(torch.float64)] if vectors else []
    if not parts:
        return []
    values: list[float] = HostCopy(torch.cat(parts) if len(parts) > 1 else parts[0]).join().tolist()
    if len(by_dtype) < 2:
        return values
    order = chain.from_iterable(by_dtype)
    return [value for _, value in sorted(zip(order, values, strict=False))] + values[len(scalars) :]


def _joined(values: Sequence[Any], dtype: torch.dtype, agreed: float | None) -> tuple[StepResult, bool]:
    """values: [replicas * M] of each microbatch: sum, count, metrics, whether it is counted."""
    sums, counts, metrics, forms = zip(*values, strict=True)
    counted = any(form for form, count in zip(forms, counts, strict=True) if count)
    if not counted:
        losses = torch.tensor(sums, dtype=dtype)
        return StepResult(losses.mean(), losses, len(values), {}), False  # as `mean_loss`
    if not all(forms):
        raise CountRefused("loss_fn returned a `Loss` for some microbatches and a scalar for others", "return one kind")
    total = math.fsum(counts)
    if agreed is not None and not math.isclose(total, agreed, rel_tol=1e-9):
        raise CountRefused(
            f"loss_fn counted {total:g} targets, and {agreed:g} were counted before the step: the gradients have a"
            " wrong weight",
            "zero them, and pass Pipeline(count_fn=...), which counts the targets as loss_fn does; the default counts"
            " labels that are not -100",
        )
    names = dict.fromkeys(name for each in metrics for name in each)
    result = StepResult(
        torch.tensor(math.fsum(sums) / total, dtype=dtype),
        torch.tensor([value / (count or 1.0) for value, count in zip(sums, counts, strict=True)], dtype=dtype),
        int(total) if total.is_integer() else total,
        {name: math.fsum(each.get(name, 0.0) for each in metrics) / total for name in names},
    )
    return result, True


def outputs_of(outputs: Mapping[int, Any], *, listed: bool) -> Any:
    """The outputs of several microbatches, by number, in one: tensors joined along their rows.

    Tensors are [rows, ...]; scalars are stacked to [microbatches]. What is no tensor is that of the first microbatch.
    listed: the batch was a list, and so are its outputs.
    """
    if listed:
        return [outputs[number] for number in sorted(outputs)]
    leaves, trees = zip(*[pytree.tree_flatten(outputs[number]) for number in sorted(outputs)], strict=True)
    return pytree.tree_unflatten([_together(parts) for parts in zip(*leaves, strict=True)], trees[0])


def _together(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.cat(list(parts)) if parts[0].dim() else torch.stack(list(parts))


def _culprit(control: ControlPlane, losses: Mapping[int, float], executors: Sequence[Executor]) -> tuple[int, int]:
    """The first microbatch with a value that is not finite, and its first such stage; for the loss, the number of
    stages."""
    mine = [
        (forward.microbatch, forward.stage.index)
        for executor in executors
        for forward, probe in executor.registers.probes
        if not bool(torch.isfinite(probe))
    ]
    everyone: list[Any] = control.fold("naming what is not finite", mine or None, _told)
    stages = executors[0].program.stages
    culprits = [(microbatch, stage) for part in everyone for microbatch, stage in part]
    microbatches = executors[0].program.microbatches
    culprits += [(m % microbatches, stages) for m, value in losses.items() if not math.isfinite(value)]
    return min(culprits, default=(0, stages))
