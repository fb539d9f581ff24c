"""What a pipeline asks of model, plan and loss where ranks share each sequence, or segments follow each other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from schedc.ir.plan import Level
from schedc.ir.program import Program
from schedc_runtime.errors import RuntimeFault, StageError
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.partition.example import of_transformers
from schedc_runtime.pipeline.build.apply_plan import recomputed_ahead
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss, Loss, LossOfMicrobatch

if TYPE_CHECKING:
    from torch import nn

    from schedc_runtime.pipeline.build.assembly import Assembly


def cuts_sequences(model: nn.Module, program: Program) -> bool:
    """Whether a pipeline cuts sequences into the segments of its program.

    A pipeline cuts the sequences of Transformers' models alone. For other models each segment is a microbatch of rows.
    """
    return program.segments > 1 and of_transformers(model)


def check_context(assembly: Assembly) -> None:
    """Raise `RuntimeFault` for the first thing, by name, that context ranks do not serve."""
    _refuse_beside(assembly, f"{assembly.mesh.context} context ranks", {})


def carry_segments(assembly: Assembly) -> None:
    """Let the model's attentions carry keys and values between segments of a sequence, if the program has such.

    Raises `RuntimeFault` for the first thing, by name, that segments do not serve, and for another model.
    """
    settings, program, plan, mesh = assembly.settings, assembly.program, assembly.plan, assembly.mesh
    if not cuts_sequences(settings.model, program):
        return
    levels = {plan.recompute_of(stage).level for stage in recomputed_ahead(program)}
    others = {
        "context ranks": mesh.context > 1,
        "compile=": assembly.compile is not None,
        "`offload` in the plan": bool(plan.offload),
        "a model on the meta device": assembly.construction.deferred,
        "`slices` in the plan": bool(plan.slices),
        "`fuse` in the plan": bool(plan.fuse),
        "an R of a stage without a level": Level.NONE in levels,
    }
    _refuse_beside(assembly, f"sequences in {program.segments} segments", others)
    from schedc_runtime.tensor_parallel.carried import carry_attentions

    carry_attentions(settings.model, program.segments)


def _refuse_beside(assembly: Assembly, who: str, others: Mapping[str, bool]) -> None:
    settings = assembly.settings
    asked = {
        "an auxiliary loss of experts": any(layer.router.routing.balance for _, layer in moe_layers(settings.model)),
        "graphs=": bool(settings.cut.graphs),
        "several losses": isinstance(settings.loss_fn, (tuple, list)),
        **others,
    }
    if taken := next((name for name, chosen in asked.items() if chosen), ""):
        raise RuntimeFault(
            f"{who} and {taken}, which a pipeline does not carry out together", "leave one of the two out"
        )


def counted_alone(loss_fn: LossOfMicrobatch | None, who: str) -> LossOfMicrobatch | None:
    """The loss function, which must give a `Loss`: parts of a sequence have unequal numbers of targets.

    who: has such parts, for errors. Raises `RuntimeFault` for means, and for a loss that takes the next token's label,
    which may lie in another part.
    """
    if isinstance(loss_fn, ChunkedLoss):
        if loss_fn.shift or loss_fn.mean != "step":
            raise RuntimeFault(
                f"{who} share each sequence, and loss_fn says shift={loss_fn.shift}, mean={loss_fn.mean!r}",
                'leave both out: give targets that are shifted already, as of `next_tokens`; the mean is over "step"',
            )
        return loss_fn
    return None if loss_fn is None else partial(_counted, loss_fn, who)


def _counted(loss_fn: LossOfMicrobatch, who: str, output: Any, target: Any) -> Loss:
    loss = loss_fn(output, target)
    if not isinstance(loss, Loss):
        raise StageError(
            f"loss_fn returned a mean, and {who} have unequal numbers of targets",
            "return Loss(sum, count)",
        )
    return loss
