"""One case of an audit: a helper repeats the microbatch and all compare. Where bits differ, three ranks are asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from schedc.diagnostics import CompilerBug
from schedc.ir.ops import OpKind
from schedc_runtime.audit.borrowed import BorrowedStages
from schedc_runtime.audit.capture import (
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    StepCapture,
    audited_values,
    weights_of,
)
from schedc_runtime.audit.choice import AuditCase, CaseTable, Helper
from schedc_runtime.audit.digests import Digests, checks_of, unlike
from schedc_runtime.audit.parcels import Courier, Parcel
from schedc_runtime.audit.repeat import Job, repeat_microbatch
from schedc_runtime.audit.verdict import AuditVerdict, RankDigests, judge, link_verdict
from schedc_runtime.execute.instruction_names import sentence
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.stage.stage import Stage

GIVEN = (INPUT, OUTPUT_GRADIENT)
"""The values that a stage was given."""
Told = Mapping[str, Any]
"""Digests from all ranks, by the names of `Trial`'s rounds."""


class Means(NamedTuple):
    """What a trial needs of a pipeline."""

    assembly: Assembly
    table: CaseTable
    courier: Courier
    borrowed: BorrowedStages


class Trial:
    """The trial of one case, on every rank alike.

    captures: of the places here. job: what the suspect was given, where it is here. lent: weights that the first helper
    was sent before the step; None where it has its own.
    """

    def __init__(
        self,
        means: Means,
        case: AuditCase,
        captures: Mapping[Coordinate, StepCapture],
        job: Job | None,
        lent: Parcel | None,
    ) -> None:
        self._means, self.case, self._captures, self._own = means, case, captures, job
        self._lent, self._places = lent, means.assembly.network.local
        self.parcel: Parcel | None = None
        """The job, where the first helper is here."""
        self.told: dict[str, Any] = {}
        """Digests from all ranks so far."""

    @property
    def helper(self) -> Helper:
        """Who repeats the microbatch first."""
        return self.case.helpers[0]

    @property
    def third(self) -> Helper | None:
        """Who is asked where the first two differ."""
        return self.case.helpers[1] if len(self.case.helpers) > 1 else None

    @property
    def row(self) -> str:
        """The forward of the microbatch in the program, with its line."""
        program, case = self._means.assembly.program, self.case
        wanted = (OpKind.F, case.stage, case.microbatch)
        for row in range(int(program.rank_start[case.suspect.pipeline]), len(program.kind)):
            x = program.instruction(row)
            if x.computes and wanted in x.ops:
                return f"{sentence(program, row)} --> {program.where(row)}"
        raise CompilerBug("an audit", f"no instruction runs {wanted}")

    @property
    def weights(self) -> dict[str, Any]:
        """The weights with which the first helper repeats, where it is here."""
        return dict(self._lent.tensors) if self._lent is not None else weights_of(self._held(self.helper.place))

    def run(self) -> AuditVerdict | None:
        """The verdict; None where all bits are equal. A collective of all ranks."""
        case, helper = self.case, self.helper
        self.parcel = self._carried(self._own, case.suspect, helper.place)
        self._gather("comparing a repeated microbatch", self._first_round())
        if (verdict := link_verdict(self._ends(), self.told["made"], self.told["got"])) is not None:
            return verdict
        given, second = self.told["given"], self.told["second"]
        if not unlike(self.told["first"], second["results"][0]) and not unlike(given, second["given"]):
            return None
        self._gather("repeating a microbatch again", self._second_round())
        verdict = self._judged()
        if verdict is None:
            self._gather("asking a third rank", self._third_round())
            verdict = self._judged()
        return verdict

    def _first_round(self) -> dict[str, Any]:
        """Digests of messages, of what the suspect was given and has computed, and of the first repetition."""
        told: dict[str, Any] = {"made": {}, "got": {}}
        for place, capture in self._captures.items():
            for name, key in audited_values(self.case).items():
                if name in capture.digests and key.maker >= 0:
                    role = "made" if self._home(key.maker) == place.pipeline else "got"
                    told[role].setdefault(name, capture.digests[name])
        suspect = self._captures.get(self.case.suspect)
        if suspect is not None:
            told["given"] = {name: each for name, each in suspect.digests.items() if name in GIVEN}
            told["before"] = suspect.weights
            told["first"] = {name: each for name, each in suspect.digests.items() if name not in GIVEN}
        if self.parcel is not None:
            told["second"] = {"given": Job.of(self.parcel).given, "results": [self._repeated(self.helper)]}
        return told

    def _second_round(self) -> dict[str, Any]:
        """The suspect repeats twice, the first helper a second time. Both add digests of their weights."""
        told: dict[str, Any] = {}
        case = self.case
        capture = self._captures.get(case.suspect)
        if capture is not None and self._own is not None:
            stage = self._held(case.suspect)
            told["held"] = capture.now()
            told["own"] = [repeat_microbatch(self._means.assembly, stage, self._own) for _ in range(2)]
            told["weights"] = checks_of(weights_of(stage))
        if self.parcel is not None:
            told["again"] = self._repeated(self.helper)
            told["other weights"] = checks_of(self.weights)
        return told

    def _third_round(self) -> dict[str, Any]:
        """A third rank repeats, with its own weights or with those of the first helper."""
        third, case = self.third, self.case
        if third is None:
            return {"third": {"results": [], "weights": {}}}
        lender = self.helper if self.helper.borrows else Helper(case.suspect, False)
        parcel, weights = self._carried(self._own, case.suspect, third.place), None
        if third.borrows:
            here = lender.place in self._places
            lent = None
            if here:
                own = self.weights if self.helper.borrows else weights_of(self._held(case.suspect))
                lent = Parcel(own, {})
            weights = self._means.courier.carry(lent, lender.place, third.place)
        if parcel is None or third.place not in self._places:
            return {}
        with self._stage(third, weights) as stage:
            results = repeat_microbatch(self._means.assembly, stage, Job.of(parcel))
            return {"third": {"results": [results], "weights": checks_of(weights_of(stage))}}

    def _judged(self) -> AuditVerdict | None:
        """The verdict of `judge` on the digests so far."""
        told, third = self.told, None
        runs = [told["first"], *told["own"]]
        first = RankDigests(told["given"], runs, told["weights"], told["held"], told["before"])
        second = RankDigests(
            told["second"]["given"], [*told["second"]["results"], told["again"]], told["other weights"],
            borrowed=self.helper.borrows,
        )  # fmt: skip
        if (each := told.get("third")) is not None:
            borrowed = self.third is not None and self.third.borrows
            third = RankDigests({}, each["results"], each["weights"], borrowed=borrowed)
        name = self._means.assembly.mesh.name
        return judge((name(self.case.suspect), name(self.helper.place)), first, second, third)

    def _repeated(self, helper: Helper) -> Digests:
        assert self.parcel is not None
        with self._stage(helper, self._lent) as stage:
            return repeat_microbatch(self._means.assembly, stage, Job.of(self.parcel))

    @contextmanager
    def _stage(self, helper: Helper, weights: Parcel | None) -> Iterator[Stage]:
        """The stage of the case at a helper."""
        if not helper.borrows:
            yield self._held(helper.place)
            return
        assert weights is not None
        with self._means.borrowed.stage(self.case.stage, weights.tensors) as stage:
            yield stage

    def _held(self, place: Coordinate) -> Stage:
        return self._means.assembly.stages[place][self.case.stage]

    def _carried(self, job: Job | None, source: Coordinate, target: Coordinate) -> Parcel | None:
        """The suspect's job, where ``target`` is here."""
        parcel = None if job is None else job.parcel()
        return self._means.courier.carry(parcel, source, target)

    def _gather(self, what: str, mine: dict[str, Any]) -> None:
        """Add the digests of all ranks to `told`."""
        for each in self._means.assembly.guard.control.gather(what, mine):
            for name, value in each.items():
                if name in ("made", "got"):
                    self.told.setdefault(name, {}).update(value)
                else:
                    self.told[name] = value

    def _home(self, stage: int) -> int:
        """The rank that runs the microbatch of the case through a stage."""
        return int(self._means.table.home[stage, self.case.microbatch])

    def _ends(self) -> dict[str, tuple[str, str]]:
        """Names of sender and receiver, by value."""
        name, place = self._means.assembly.mesh.name, self.case.suspect
        ends: dict[str, tuple[str, str]] = {}
        stages = self._means.assembly.program.stages
        takers = {OUTPUT: self.case.stage + 1, INPUT_GRADIENT: self.case.stage - 1}
        for value, key in audited_values(self.case).items():
            taker = takers.get(value, self.case.stage)
            if 0 <= key.maker < stages and 0 <= taker < stages:
                source, target = (name(place._replace(pipeline=self._home(stage))) for stage in (key.maker, taker))
                ends[value] = source, target
        return ends
