"""What a pipeline asks of model, plan and loss where context ranks share each sequence."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from schedc_runtime.errors import RuntimeFault, StageError
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss, Loss, LossOfMicrobatch

if TYPE_CHECKING:
    from schedc_runtime.pipeline.build.assembly import Assembly


def check_context(assembly: Assembly) -> None:
    """Raise `RuntimeFault` for the first thing, by name, that context ranks do not serve, and tensor ranks do."""
    settings = assembly.settings
    asked = {
        "an auxiliary loss of experts": any(layer.router.routing.balance for _, layer in moe_layers(settings.model)),
        "compile=": assembly.compile is not None,
        "graphs=": bool(settings.cut.graphs),
        "`offload` in the plan": bool(assembly.plan.offload),
        "several losses": isinstance(settings.loss_fn, (tuple, list)),
    }
    if taken := next((name for name, chosen in asked.items() if chosen), ""):
        raise RuntimeFault(
            f"{assembly.mesh.context} context ranks and {taken}, which a pipeline does not carry out together",
            "leave one of the two out",
        )


def counted_alone(loss_fn: LossOfMicrobatch | None) -> LossOfMicrobatch | None:
    """The loss function, which must give a `Loss`: context ranks have unequal numbers of targets.

    Raises `RuntimeFault` for means, and for a loss that takes the next token's label, which may lie on another rank.
    """
    if isinstance(loss_fn, ChunkedLoss):
        if loss_fn.shift or loss_fn.mean != "step":
            raise RuntimeFault(
                f"context ranks share each sequence, and loss_fn says shift={loss_fn.shift}, mean={loss_fn.mean!r}",
                'leave both out: targets of `context_rows` are shifted already, and the mean is over the "step"',
            )
        return loss_fn
    return None if loss_fn is None else partial(_counted, loss_fn)


def _counted(loss_fn: LossOfMicrobatch, output: Any, target: Any) -> Loss:
    loss = loss_fn(output, target)
    if not isinstance(loss, Loss):
        raise StageError(
            "loss_fn returned a mean, and context ranks have unequal numbers of targets",
            "return Loss(sum, count)",
        )
    return loss
