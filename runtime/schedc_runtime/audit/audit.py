"""`Audit`: lets another rank repeat a microbatch of each rank in turn, to prove which device computes wrongly.

pipe = Pipeline(model, program, loss_fn=loss_fn, audit=Audit())
"""

from __future__ import annotations

from dataclasses import dataclass

from schedc_runtime.audit.settings import AuditSettings
from schedc_runtime.audit.watch import AuditWatch
from schedc_runtime.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Audit(AuditSettings):
    """How microbatches are repeated.

    every: training steps from one repetition to the next. A repetition runs a microbatch through a stage.
    folder: where evidence is written when bits differ, for ``schedc prove``.
    on_fault: ``"stop"`` raises `WrongBits` on all ranks behind the step; ``"tell"`` prints it and goes on.
    """

    def watch(self, pipe: Pipeline) -> AuditWatch:
        """Begin to audit the training steps of a pipeline. A collective of all its ranks.

        Raises `RuntimeFault` on every rank alike for a pipeline whose microbatches cannot be repeated.
        """
        watch = AuditWatch(pipe, self)
        runner = pipe._runner
        runner.watches = [*(each for each in runner.watches if not isinstance(each, AuditWatch)), watch]
        return watch
