"""Audits the training steps of a pipeline: captures, has a microbatch repeated, and compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import process_time_ns
from typing import Any

from schedc_runtime.audit.borrowed import BorrowedStages
from schedc_runtime.audit.capture import INPUT, OUTPUT_GRADIENT, StepCapture, weights_of
from schedc_runtime.audit.choice import AuditCase, CaseTable, Helper
from schedc_runtime.audit.fitness import device_facts, may_borrow, may_repeat, obstacles
from schedc_runtime.audit.parcels import Courier, Parcel
from schedc_runtime.audit.repeat import Job
from schedc_runtime.audit.report import Report
from schedc_runtime.audit.settings import AuditSettings
from schedc_runtime.audit.trial import Means, Trial
from schedc_runtime.audit.verdict import AuditVerdict, VerdictKind
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Executor
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.random_numbers.numbering import StepKey
from schedc_runtime.ranks.mesh import Coordinate


class AuditWatch:
    """The audit of one pipeline. `proved` says how far the work of each rank is known to be right."""

    def __init__(self, pipe: Pipeline, audit: AuditSettings) -> None:
        self.audit, self._runner, self._assembly = audit, pipe._runner, pipe._assembly
        assembly = self._assembly
        self._control, self._mesh = assembly.guard.control, assembly.mesh
        with assembly.guard("beginning to audit"):
            told = {"facts": device_facts(assembly.device), "obstacle": next(obstacles(assembly), None)}
            everyone = self._control.gather("beginning to audit", told)
        for each in everyone:
            if each["obstacle"] is not None:
                raise RuntimeFault(f"this pipeline cannot be audited: {each['obstacle'][0]}", each["obstacle"][1])
        self._facts = [each["facts"] for each in everyone]
        assembly.fixed = [*dict.fromkeys([*assembly.fixed, "an audit repeats microbatches of the program"])]
        self._unborrowed = [may_borrow(assembly, stage) for stage in range(assembly.program.stages)]
        self.table = CaseTable(assembly.program, assembly.mesh, self._fits)
        cases = map(self.table.case, range(len(self.table.suspects) * assembly.program.stages))
        if not any(case is not None for case in cases):
            raise RuntimeFault(
                f"no rank of this pipeline can be audited: nobody can repeat its microbatches: {self._why_alone()}",
                "take a schedule with two copies of each stage, such as dualpipe, or replicas",
            )
        self.proved: dict[str, int] = {}
        """By name of a rank: number of training steps up to the last one in which its work was repeated alike."""
        self.off: dict[int, str] = {}
        """Stages that are no longer audited, with the reason."""
        self.verdicts: list[AuditVerdict] = []
        self.audited, self.spent, self.stepped = 0, 0, 0
        """Number of audited steps; nanoseconds of processor time here of the audit, and of the steps without it."""
        self._means = Means(assembly, self.table, Courier(assembly), BorrowedStages(assembly))
        self._captures: dict[Coordinate, StepCapture] = {}
        self._case: AuditCase | None = None
        self._lent: Parcel | None = None
        self._head: tuple[float | None, float] = (None, 1.0)
        self._began, self.step = 0, 0
        self.trial: Trial | None = None
        """The last one."""
        self._tell(self.lines())

    def lines(self) -> list[str]:
        """The ranks that are audited, and the cost, for people."""
        program, suspects = self._assembly.program, self.table.suspects
        share = 1 / (program.ranks * self._mesh.replicas * program.microbatches)
        first = [case for number in range(len(suspects)) if (case := self.table.case(number)) is not None]
        lines = [
            f"audit: in every {f'{self.audit.every}th ' * (self.audit.every > 1)}step another rank repeats one"
            f" microbatch of a rank: {100 * share:.2g} % of the step's compute, and digests; all wait for it",
        ]
        borrowed = sorted({case.stage for case in first if case.helpers[0].borrows})
        if borrowed:
            lines.append(f"  stages {', '.join(map(str, borrowed))} lie on one rank: their weights are sent for it")
        alone = {self._mesh.name(place) for place in suspects} - {self._mesh.name(case.suspect) for case in first}
        if alone:
            lines.append(f"  nobody can repeat for {', '.join(sorted(alone))}: {self._why_alone()}")
        return lines

    def begin(self, executors: Sequence[Executor]) -> None:
        """A step begins. The suspect may send weights to another rank."""
        self._leave()
        runner = self._runner
        self.step = runner.trained
        case = None if self.step % self.audit.every else self.table.case(self.step // self.audit.every)
        if case is None or case.stage in self.off:
            return
        with self._measured():
            self._case, self._head = case, (self._assembly.head.weight, self._assembly.head.scale)
            helper = case.helpers[0]
            if helper.borrows:
                weights = self._weights(case)
                parcel = None if weights is None else Parcel(weights, {})
                self._lent = self._means.courier.carry(parcel, case.suspect, helper.place)
            for place, executor in zip(self._assembly.places, executors, strict=True):
                if place.replica == case.suspect.replica:
                    self._captures[place] = self._capture(place, executor, case)
        self._began = process_time_ns()

    def end(self, step: int) -> None:
        """The step has ended: have a microbatch repeated. A collective. Raises `WrongBits` on every rank alike."""
        case = self._case
        if case is None:
            return
        inside = sum(capture.spent for capture in self._captures.values())
        self.stepped += process_time_ns() - self._began - inside
        self.spent += inside
        self.audited += 1
        with self._measured():
            trial = self.trial = Trial(self._means, case, self._captures, self._job(case), self._lent)
            verdict = trial.run()
            self._leave()
        suspect = self._mesh.name(case.suspect)
        if verdict is None:
            self.proved[suspect] = step
            return
        self.verdicts.append(verdict)
        if verdict.kind is VerdictKind.UNSTABLE:
            self.off[case.stage] = f"{' and '.join(verdict.values)} had other bits in each run, on two ranks"
            self._tell([f"schedc: stage {case.stage} is no longer audited: {self.off[case.stage]}"])
            return
        devices = {self._mesh.name(place): self.facts(place) for place in self.table.suspects}
        report = Report(self._assembly, trial, verdict, step, self.proved, devices, Path(self.audit.folder))
        report.write()
        self._control.gather("writing evidence", None)
        if self.audit.on_fault == "stop":
            raise report.error()
        self._tell([f"schedc: {report.error()}"])

    def _weights(self, case: AuditCase) -> dict[str, Any] | None:
        """The weights of the suspect's stage, where the suspect is here."""
        held = self._assembly.stages.get(case.suspect)
        return None if held is None else weights_of(held[case.stage])

    def _capture(self, place: Coordinate, executor: Executor, case: AuditCase) -> StepCapture:
        held = self._assembly.stages[place]
        if place != case.suspect:
            return StepCapture(executor, case, None, set())
        others = [stage for index, stage in held.items() if index != case.stage]
        shared = {id(each) for stage in others for each in stage.module.parameters()}
        return StepCapture(executor, case, held[case.stage], shared)

    def _job(self, case: AuditCase) -> Job | None:
        """What the suspect was given, where it is here."""
        capture = self._captures.get(case.suspect)
        if capture is None:
            return None
        stage, assembly = self._assembly.stages[case.suspect][case.stage], self._assembly
        first = case.suspect.replica * assembly.program.microbatches * stage.slices
        key = StepKey(assembly.settings.seed, self.step, first, "step")
        given = capture.tensors[INPUT], capture.tensors.get(OUTPUT_GRADIENT, ())
        return Job(
            case.microbatch, *given, capture.target, key, case.defer, case.first, capture.loss_scale, *self._head
        )

    def _leave(self) -> None:
        """Leave the executors as they were."""
        for capture in self._captures.values():
            capture.end()
        self._captures, self._case, self._lent = {}, None, None

    def _fits(self, suspect: Coordinate, helper: Helper, stage: int) -> bool:
        """Whether a helper may be expected to compute equal bits."""
        if helper.borrows and self._unborrowed[stage]:
            return False
        return self._assembly.network.in_process or may_repeat(self.facts(suspect), self.facts(helper.place))

    def facts(self, place: Coordinate) -> Mapping[str, Any]:
        """What computes at a place (`device_facts`)."""
        facts: Mapping[str, Any] = self._facts[0 if self._assembly.network.in_process else self._mesh.process(place)]
        return facts

    def _why_alone(self) -> str:
        reasons = {reason for reason in self._unborrowed if reason}
        return ", ".join(sorted(reasons)) or "no other rank has the same device, torch and number of threads"

    def _tell(self, lines: Sequence[str]) -> None:
        if self._control.process == 0:
            print("\n".join(lines), file=sys.stderr, flush=True)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        begin = process_time_ns()
        yield
        self.spent += process_time_ns() - begin
