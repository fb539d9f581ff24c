"""Calls around an optimizer's step: gradients are zeroed and clipped, biases and experts move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from schedc_runtime.pipeline.agree.counts import Accumulation
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.step.bias_updates import update_biases
from schedc_runtime.pipeline.step.norms import clip, total_norm, unscale
from schedc_runtime.pipeline.step.step import StepRunner

if TYPE_CHECKING:
    from schedc_runtime.pipeline.step.rebalance import Moved, Optimizers


class OptimizerCalls(ABC):
    """The part of a `Pipeline` that is called between its steps."""

    _assembly: Assembly
    _runner: StepRunner

    @abstractmethod
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the stages held here."""

    def zero_grad(self) -> None:
        """Drop the gradients of the stages held here."""
        for parameter in self.parameters():
            parameter.grad = None
        self._runner.accumulation = Accumulation()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients of all ranks so that their norm is at most ``max_norm``. A collective, between steps.

        Every parameter of the model counts once. norm_type: ``2.0``, ``float("inf")``, ... error_if_nonfinite: raise
        `NonFiniteNorm`, on every rank, for a norm that is NaN or infinite.

        Returns the norm before, a scalar of float64 if a gradient is, else of float32. All ranks have the same. So has
        every number of ranks, and every schedule that adds up the microbatches of a stage in one order. Those with two
        copies of a stage add in another order; the last bit may then differ.
        """
        norm, dtype = total_norm(self._assembly, norm_type, refuse=error_if_nonfinite)
        clip(list(self.parameters()), norm, max_norm)
        return torch.tensor(norm, dtype=dtype, device=self._assembly.device)

    def unscale_(self, scaler: Any, optimizer: torch.optim.Optimizer | None) -> None:
        """Divide the gradients by the scale of a `torch.amp.GradScaler`: all ranks skip the update, or none.

        A collective, between steps: after `step` with ``scale=scaler.get_scale()``, before `clip_grad_norm_`.
        optimizer: of this process; None where no parameters are here.
        """
        unscale(self._assembly, scaler, optimizer)

    def update_biases(self) -> None:
        """Move the routers' biases against the load since the last call (loss-free balancing).

        Call it once per optimizer step, on all ranks. The layers' statistics begin anew.
        """
        with self._assembly.guard("updating the routers' biases"):
            update_biases(self._assembly, self._runner.start)
        self._runner.facts.updates += 1

    def rebalance(
        self,
        optimizer: Optimizers,
        placement: Mapping[str, Sequence[int]] | None = None,
        extra: Sequence[Mapping[str, Tensor]] = (),
    ) -> Moved:
        """Move experts to other ranks, with all that is their own. A collective, between steps, behind ``zero_grad``.

        optimizer: that of this process, or several; None without any. Its states of the parameters' shape move, too.
        placement: [experts] the expert at each place of a layer, by the layer's name; those of rank 0 come first. By
            default as ``migrate`` in the plan says, which lets them move every so many steps: call it behind each step.
        extra: state dicts [local experts, ...] of this process by names of parameters, such as averaged weights.

        States stay as they are by name: `full_state_dict` and checkpoints show no placement. Raises the same
        `RuntimeFault` on every rank for what cannot move; nothing has changed then.
        """
        from schedc_runtime.pipeline.step.migrate import rebalance

        runner = self._runner
        moved = rebalance(self._assembly, runner.accumulation, runner.trained, optimizer, placement, extra)
        runner.moves += bool(moved.experts)
        return moved
