"""Why the rows of a microbatch see each other: repeated rows would then change the results of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import MoELayer, outlines_kept
from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.partition.effects import ambient
from schedc_runtime.partition.example import arguments
from schedc_runtime.pipeline.agree.batch import Agreement, BatchRefused, microbatch_of, not_padded_batch
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.stage.stage import Stage

if TYPE_CHECKING:
    from schedc_runtime.row_flow.flows import RowPlace
    from schedc_runtime.row_flow.follow import RowsOf


def candidates(stages: Iterable[Stage]) -> list[tuple[str, nn.Module]]:
    """The modules of the stages, with their names, in which rows may see each other."""
    modules = (pair for stage in stages for pair in stage.module.named_modules())
    return [(name, module) for name, module in modules if isinstance(module, (_NormBase, MoELayer))]


def meeting(modules: Iterable[tuple[str, nn.Module]], training: bool) -> str:
    """The first reason, by name of the module; "" if rows are independent. training: the call computes gradients."""
    return next((f"`{name}` {why}" for name, module in modules for why in _reasons(module, training)), "")


def mixing(stages: Iterable[Stage], training: bool) -> str:
    """Why a stage in slices would give other results than with whole microbatches; "" if none would.

    Auxiliary losses are formed over all slices, and loads of experts are sums. training: the call computes gradients.
    """
    norms = [(n, m) for n, m in candidates(x for x in stages if x.slices > 1) if isinstance(m, _NormBase)]
    return meeting(norms, training)


def _reasons(module: nn.Module, training: bool) -> Iterator[str]:
    training = training and module.training
    if isinstance(module, MoELayer):
        if module.counter.capacity is not None:
            yield "drops what is beyond a capacity that all rows share"
        if training and module.router.routing.balance != 0:
            yield "has an auxiliary loss, a mean over all rows"
        if training and module.router.bias is not None:
            yield "moves its biases by the load of all rows"
    elif isinstance(module, _NormBase):
        running = module.running_mean is not None
        if (training and running) or (not isinstance(module, _InstanceNorm) and (training or not running)):
            yield f"is a {type(module).__name__}: its statistics are of all rows of a microbatch"


class RowChecks:
    """Whether rows of a microbatch see each other in the stages here, by kind of batch."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._known: dict[str, RowsOf | str] = {}

    def check(self, agreed: Agreement, microbatches: int, replicas: int) -> None:
        """Refuse a batch that is padded, or whose microbatches run in slices, where rows see each other. A collective.

        replicas: number of replicas in the batch of a process. Raises `BatchRefused` on every rank alike.
        """
        assembly, rows = self._assembly, agreed.rows
        slices = assembly.plan.row_slices
        sliced, padded = any(count > 1 for count in slices), rows is not None and rows.padded
        if not sliced and not padded:
            return
        found = self._found(agreed.signature, microbatches)
        mine = [_of_slices(found, self._here(), slices) if sliced else "", _of_padding(found, self._here())]
        of_slices, of_padding = zip(*assembly.guard.control.gather("comparing where rows meet", mine), strict=True)
        if why := next(filter(None, of_slices), ""):
            raise BatchRefused(
                f"a stage in slices lets rows of a microbatch see each other: {why}",
                "leave `slices` out of this stage, or let every row follow from itself alone",
            )
        if padded and (why := next(filter(None, of_padding), "")):
            raise not_padded_batch(agreed, replicas, why, "let every row follow from itself alone")

    def _here(self) -> frozenset[int]:
        return frozenset(stage.index for stage in self._assembly.held())

    def _found(self, signature: Any, microbatches: int) -> RowsOf | str:
        """What was found of the model on a batch of this kind; why nothing was."""
        from schedc_runtime.row_flow.follow import follow

        partition, training = self._assembly.partition, any(s.module.training for s in self._assembly.held())
        args, kwargs = arguments(microbatch_of(signature, microbatches))
        kinds = pytree.tree_map(_kind, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
        key = f"{kinds} {training} {ambient()} {partition.records.reads.key(training)}"
        if key not in self._known:
            try:
                with outlines_kept(partition.records.model):
                    self._known[key] = follow(partition.records, args, kwargs, training=training)
            except RuntimeFault as error:
                self._known[key] = f"on another number of rows, {error.message}"
        return self._known[key]


def _of_slices(found: RowsOf | str, here: Collection[int], slices: Sequence[int]) -> str:
    """Why a stage in slices computes otherwise than with whole microbatches; "" if none does."""
    if isinstance(found, str):
        return found
    for meeting, stage in found.meetings:
        if stage in here and slices[stage] > 1:
            return f"stage {stage}, {meeting}"
    for before, layouts in enumerate(found.crossing):
        if any(slices[stage] > 1 for stage in (before, before + 1)) and any(_folded(layout) for layout in layouts):
            return f"what crosses to stage {before + 1} has another dimension ahead of its rows, folded with them"

    return ""


def _of_padding(found: RowsOf | str, here: Collection[int]) -> str:
    """Why repeated rows change the results of the others; "" if they do not."""
    if isinstance(found, str):
        return found
    for meeting, stage in found.meetings:
        if stage in here:
            return str(meeting)
    for layout in found.outputs:
        if layout is not None and (layout.dim or layout.outer != 1):
            return f"the model's output has its rows in dimension {layout.dim}, not ahead of all else"
    return ""


def _folded(layout: RowPlace | None) -> bool:
    return layout is not None and layout.outer != 1


def _kind(leaf: Any) -> Any:
    """A leaf of a batch without its sizes, on which the operations of a model seldom depend."""
    if isinstance(leaf, TensorSpec):
        return len(leaf.shape), leaf.dtype, leaf.rows, leaf.known
    return leaf
