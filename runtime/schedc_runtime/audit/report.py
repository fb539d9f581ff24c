"""What is said and written of a verdict: the error of all ranks, and evidence for ``schedc prove``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from schedc_runtime.audit.trial import Trial
from schedc_runtime.audit.verdict import Verdict, VerdictKind
from schedc_runtime.errors import WrongBits

if TYPE_CHECKING:
    from schedc_runtime.audit.watch import AuditWatch

_SAYS = {
    VerdictKind.TRANSIENT: "{0} computes wrongly now and then: when it repeats a microbatch, it gets other bits",
    VerdictKind.PERSISTENT: "{0} computes wrongly each time: two other ranks get equal bits, and it gets others",
    VerdictKind.MEMORY: "the memory of {0} has changed by itself",
    VerdictKind.LINK: "the link from {0} to {1} changes what it carries",
    VerdictKind.EITHER: "{0} or {1} computes wrongly: each repeats its own bits, and no third rank can tell",
}
_NAMED = "take {0} out of the job"
_HELP = {
    VerdictKind.LINK: "take this link out of the job",
    VerdictKind.EITHER: "repeat the evidence elsewhere: schedc prove {folder}",
}
_LISTED = 3
"""Values that an error names, at most."""


class Report:
    """A verdict on a step, in words and as files. step: number of the training step, counted from 1."""

    def __init__(self, watch: AuditWatch, trial: Trial, verdict: Verdict, step: int) -> None:
        self._watch, self._trial, self._verdict, self._step = watch, trial, verdict, step
        name = f"step-{step:08}-{watch.name(trial.case.suspect).replace(' ', '-')}"
        self.folder = Path(watch.audit.folder) / name

    @property
    def proved(self) -> int:
        """Number of training steps up to which the work of all the accused is known to be right."""
        return min(self._watch.proved.get(rank, 0) for rank in self._verdict.ranks)

    def error(self) -> WrongBits:
        """The error that every rank raises."""
        case, verdict = self._trial.case, self._verdict
        values = list(verdict.values)
        listed = ", ".join(values[:_LISTED]) + (f" and {len(values) - _LISTED} more" if len(values) > _LISTED else "")
        lines = [
            _SAYS[verdict.kind].format(*verdict.ranks),
            f"  step {self._step}, stage {case.stage}, microbatch {case.microbatch} of"
            f" {self._watch.name(case.suspect)}, repeated by {self._watch.name(self._trial.helper.place)}; differs:"
            f" {listed}",
            *[f"  {rank}: {self._device(rank)}" for rank in verdict.ranks],
            f"  the last step that was proved: {self.proved or 'none'}",
        ]
        help = _HELP.get(verdict.kind, _NAMED).format(*verdict.ranks, folder=self.folder)
        help += f"; zero the gradients, and go on from a state not newer than step {self.proved}"
        return WrongBits("\n".join(lines), help, verdict.ranks, self.proved)

    def _device(self, rank: str) -> str:
        facts = self._watch.facts(self._watch.place(rank))
        return f"{facts['device']}, pid {facts['pid']} on {facts['host']}"

    def write(self) -> None:
        """Write the evidence where the first helper is."""
