"""What is said and written of a verdict: the error of all ranks, and evidence for ``schedc prove``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedc_runtime.audit.digests import checks_of
from schedc_runtime.audit.evidence import Evidence, settings_of_run, write_evidence
from schedc_runtime.audit.trial import Trial
from schedc_runtime.audit.verdict import AuditVerdict, VerdictKind
from schedc_runtime.errors import WrongBits
from schedc_runtime.pipeline.build.assembly import Assembly

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


@dataclass(frozen=True)
class Report:
    """A verdict on a step, in words and as files.

    step: number of the training step, counted from 1. proved: by name of a rank, the last step in which its work was
    repeated alike. devices: by name of a rank, its `device_facts`. root: folder of all evidence.
    """

    assembly: Assembly
    trial: Trial
    verdict: AuditVerdict
    step: int
    proved: Mapping[str, int]
    devices: Mapping[str, Mapping[str, Any]]
    root: Path

    @property
    def suspect(self) -> str:
        """The name of the rank whose microbatch was repeated."""
        return self.assembly.mesh.name(self.trial.case.suspect)

    @property
    def folder(self) -> Path:
        """The folder of this verdict's evidence."""
        return self.root / f"step-{self.step:08}-{self.suspect.replace(' ', '-')}"

    @property
    def last_proved(self) -> int:
        """Number of training steps up to which the work of all the accused is known to be right."""
        return min(self.proved.get(rank, 0) for rank in self.verdict.ranks)

    def error(self) -> WrongBits:
        """The error that every rank raises."""
        case, ranks, values = self.trial.case, self.verdict.ranks, list(self.verdict.values)
        listed = ", ".join(values[:_LISTED]) + (f" and {len(values) - _LISTED} more" if len(values) > _LISTED else "")
        helper = self.assembly.mesh.name(self.trial.helper.place)
        lines = [
            _SAYS[self.verdict.kind].format(*ranks),
            f"  step {self.step}, stage {case.stage}, microbatch {case.microbatch} of {self.suspect},"
            f" repeated by {helper}; differs: {listed}",
            *(f"  {rank}: {self.devices[rank]['device']}, pid {self.devices[rank]['pid']} on"
              f" {self.devices[rank]['host']}" for rank in ranks),
            f"  the last step in which the work was proved: {self.last_proved or 'none'}; evidence: {self.folder}",
        ]  # fmt: skip
        help = _HELP.get(self.verdict.kind, _NAMED).format(*ranks, folder=self.folder)
        help += f"; zero the gradients, and go on from a state not newer than step {self.last_proved}"
        return WrongBits("\n".join(lines), help, ranks, self.last_proved)

    def write(self) -> None:
        """Write the evidence, where the first helper is here. The words of the error are in it."""
        trial, case, assembly = self.trial, self.trial.case, self.assembly
        if trial.parcel is None:
            return
        weights, told = trial.weights, trial.told
        witnesses = {self.suspect: told["first"], assembly.mesh.name(trial.helper.place): told["second"]["results"][0]}
        if trial.third is not None and told.get("third"):
            witnesses[assembly.mesh.name(trial.third.place)] = told["third"]["results"][0]
        facts = {
            "stage": case.stage, "step": self.step, "suspect": self.suspect, "row": trial.row,
            "verdict": str(self.error()), "signature": assembly.bound_code.signature,
            "witnesses": witnesses, "given": told["second"]["given"], "weights": checks_of(weights),
            "devices": {name: dict(self.devices[name]) for name in witnesses}, "settings": settings_of_run(assembly),
        }  # fmt: skip
        write_evidence(self.folder, Evidence(assembly.settings.program, facts, trial.parcel, weights))
