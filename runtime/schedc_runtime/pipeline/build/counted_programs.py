"""The programs of a pipeline: some are given to it, and one per number of microbatches is compiled when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.ir.communicators import ranks_of_communicators
from schedc.ir.program import Program
from schedc.ir.works import WorkKind
from schedc.step.program.tied import with_tied
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.cell_programs import cells_on_rank, check_cells
from schedc_runtime.partition.shared import ties_of
from schedc_runtime.pipeline.agree.agreement import check_fingerprints, difference, program_digest
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.pipeline.build.apply_plan import recomputed_ahead
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.own_works import OwnWorks

MOST = 7
"""Programs beside a pipeline's own: their streams stay bound."""


class CountedPrograms:
    """The programs of one pipeline, whose stages, cells, groups and plan stay the same."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._own: dict[int, OwnWorks] = {}
        self._made: dict[tuple[str, int, int], Program] = {}
        if len(assembly.settings.others) > MOST:
            raise RuntimeFault(f"{len(assembly.settings.others)} other programs, {MOST} are the most", "leave some out")
        self._others = [OwnWorks.of(self._other(each)) for each in assembly.settings.others]

    def given(self, microbatches: int) -> Iterator[Program]:
        """The programs of a step that were given, the pipeline's own first; none for another number of microbatches."""
        if microbatches == self._assembly.program.microbatches:
            yield from (self.of("step", microbatches, number) for number in range(len(self._others) + 1))

    def forget(self) -> None:
        """Works among replicas have changed: make programs anew."""
        self._made.clear()

    def of(self, name: str, microbatches: int, number: int = 0) -> Program:
        """The program of a call: ``step`` or ``evaluate``. A collective of all ranks where it is new.

        number: 0 for the pipeline's own program, n for the n-th of the others.

        Raises the same `BatchRefused` on every rank for a number that the schedule cannot have, or not with what the
        pipeline was built with.
        """
        assembly = self._assembly
        if not 0 <= number <= len(self._others):
            raise BatchRefused(f"program {number} of {len(self._others) + 1}", "pass Pipeline(..., others=[...])")
        if name == "step" and not number and microbatches == assembly.program.microbatches:
            return assembly.program
        if number and microbatches != assembly.program.microbatches:
            raise BatchRefused(f"program {number} and {microbatches} microbatches", "leave one of the two out")
        if name == "step" and assembly.fixed:
            asked = f"program {number}" if number else f"microbatches={microbatches}"
            raise BatchRefused(f"step({asked}): {assembly.fixed[0]}", "leave it out")
        key = name, microbatches, number
        if key not in self._made:
            own = self._others[number - 1] if number else self._of_count(microbatches)
            sizes = assembly.stage_bytes
            self._made[key] = own.training(sizes) if name == "step" else own.evaluation(sizes)
        return self._made[key]

    def _of_count(self, microbatches: int) -> OwnWorks:
        if microbatches == self._assembly.own.alone.microbatches:
            return self._assembly.own
        if microbatches not in self._own:
            self._own[microbatches] = OwnWorks.of(self._compiled(microbatches))
        return self._own[microbatches]

    def _compiled(self, microbatches: int) -> Program:
        assembly, family = self._assembly, self._assembly.settings.program.family
        what = f"{assembly.program.name} cannot have {microbatches} microbatches"
        if family is None:
            raise BatchRefused(
                f"{what}: the program was read from a file", "compile it in this process: schedc.compile(...)"
            )
        try:
            program = family(microbatches)
        except DiagnosticError as error:
            first = error.diagnostics[0]
            raise BatchRefused(f"{what}: {first.message}", first.help or "take another number") from None
        if reason := next((text for text, differs in _LIMITS.items() if differs(assembly, program)), ""):
            raise BatchRefused(f"{what} in this pipeline: {reason}", "build a pipeline for that number")
        program = self._tied(program)
        self._agree(program)
        return program

    def _other(self, program: Program) -> Program:
        """A program that was given beside the pipeline's own. Raises `RuntimeFault` where it cannot run here."""
        reasons = [text for text, differs in {**_OTHERS, **_LIMITS}.items() if differs(self._assembly, program)]
        if reasons:
            raise RuntimeFault(f"{program.name} cannot run in this pipeline: {reasons[0]}", "leave it out of `others`")
        program = self._tied(program)
        self._check_cells(program)
        return program

    def _tied(self, program: Program) -> Program:
        parts = self._assembly.partition
        return with_tied(program, ties_of(parts.shared, parts.modules))

    def _agree(self, program: Program) -> None:
        """Compare the program with those of other ranks, and check its cells."""
        assembly, mine = self._assembly, {"program": program_digest(program)}
        control = assembly.guard.control
        check_fingerprints(
            control.fold(
                f"compiling {program.microbatches} microbatches",
                mine,
                lambda everyone: difference(everyone, control.names),
            )
        )
        self._check_cells(program)

    def _check_cells(self, program: Program) -> None:
        assembly = self._assembly
        for place in assembly.places:
            if place.replica == assembly.places[0].replica:
                listed = cells_on_rank(program, place.pipeline, assembly.stages[place], assembly.cell_source)
                check_cells(program, place.pipeline, listed, assembly.network.peer_groups[place].inside_layers)


def _plan_differs(assembly: Assembly, program: Program) -> bool:
    own = assembly.settings.program
    return (program.plan, program.layout, program.layers) != (own.plan, own.layout, own.layers)


def _moves(_assembly: Assembly, program: Program) -> bool:
    return bool(len(program.works) and {WorkKind.OFFLOAD, WorkKind.FETCH} & set(program.works.kind.tolist()))


def _lies_elsewhere(assembly: Assembly, program: Program) -> bool:
    mine, its = assembly.program.placement, program.placement
    same = mine.first_microbatch == its.first_microbatch and np.array_equal(mine.rank_of_stage, its.rank_of_stage)
    return not same or program.segments != assembly.program.segments


_OTHERS: Mapping[str, Callable[[Assembly, Program], bool]] = {
    "its stages or microbatches lie elsewhere": _lies_elsewhere,
    "`hot` and `balance` follow the order of one program": lambda assembly, _: bool(
        assembly.plan.hot or assembly.plan.balance
    ),
}
"""By reason: whether a program cannot run beside the pipeline's own."""
_LIMITS: Mapping[str, Callable[[Assembly, Program], bool]] = {
    "Cut(graphs='step') holds a graph of one program": lambda assembly, _: assembly.settings.cut.graphs == "step",
    "the plan chooses otherwise for it": _plan_differs,
    "what leaves for the host was settled when the pipeline was built": _moves,
    "other stages recompute ahead of their backwards": lambda assembly, program: (
        recomputed_ahead(program) != recomputed_ahead(assembly.own.alone)
    ),
    "its messages need other communicators": lambda assembly, program: (
        bool(program.communicators.size)
        and ranks_of_communicators(program) != ranks_of_communicators(assembly.own.alone)
    ),
}
"""By reason: whether a program cannot run in a pipeline that was built for another one."""
