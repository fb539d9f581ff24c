"""`Audit`: lets another rank repeat a microbatch of each rank in turn, to prove which device computes wrongly.

pipe = Pipeline(model, program, loss_fn=loss_fn, audit=Audit())
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedc_runtime.errors import RuntimeFault

if TYPE_CHECKING:
    from schedc_runtime.audit.watch import AuditWatch
    from schedc_runtime.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Audit:
    """How microbatches are repeated.

    every: training steps from one repetition to the next. A repetition runs a microbatch through a stage.
    folder: where evidence is written when bits differ, for ``schedc prove``.
    on_fault: ``"stop"`` raises `WrongBits` on all ranks behind the step; ``"tell"`` prints it and goes on.
    """

    every: int = 1
    folder: str | os.PathLike[str] = "audit"
    on_fault: str = "stop"

    def __post_init__(self) -> None:
        if self.every < 1 or self.on_fault not in ("stop", "tell"):
            raise RuntimeFault(
                f"Audit(every={self.every}, on_fault={self.on_fault!r})",
                'every is at least 1, and on_fault is "stop" or "tell"',
            )

    def watch(self, pipe: Pipeline) -> AuditWatch:
        """Begin to audit the training steps of a pipeline. A collective of all its ranks.

        Raises `RuntimeFault` on every rank alike for a pipeline whose microbatches cannot be repeated.
        """
        from schedc_runtime.audit.watch import AuditWatch

        watch = AuditWatch(pipe, self)
        pipe._runner.watches = [each for each in pipe._runner.watches if not isinstance(each, AuditWatch)] + [watch]
        return watch
