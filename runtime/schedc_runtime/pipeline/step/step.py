"""One call of a pipeline: the batch agreed on and split, the program run, and what was formed shared with all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from schedc.ir.program import Program
from schedc_runtime.data_parallel.mixed_lists import scale_gradients
from schedc_runtime.device.regions import graph_region
from schedc_runtime.execute.executor import Executor, Interval, run_together
from schedc_runtime.moe.fp8 import WEIGHTS
from schedc_runtime.moe.sizes import Marks, overflowed
from schedc_runtime.pipeline.agree.batch import SCALAR, Agreement, BatchRefused, StepRequest, not_padded_batch
from schedc_runtime.pipeline.agree.contents import GivenBatches, check_given
from schedc_runtime.pipeline.agree.counts import Accumulation, CountOfTargets, counted
from schedc_runtime.pipeline.agree.ragged import cut_batch
from schedc_runtime.pipeline.agree.sequences import POSITIONS, segmented_call, whole_sequences
from schedc_runtime.pipeline.agree.shapes import agree_on_call, facts_of_call, signature_of_call
from schedc_runtime.pipeline.agree.step_facts import StepFacts, check_facts, differing
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.context import cuts_sequences
from schedc_runtime.pipeline.build.counted_programs import CountedPrograms
from schedc_runtime.pipeline.build.loss_function import count_of_loss
from schedc_runtime.pipeline.build.materialize import check_materialized
from schedc_runtime.pipeline.build.random_steps import random_numbers
from schedc_runtime.pipeline.build.shape_limits import check_listed
from schedc_runtime.pipeline.build.tied import check_copies
from schedc_runtime.pipeline.state.snapshots import Snapshots
from schedc_runtime.pipeline.step.call import CheckFinite, PipelineCall, StepWatch
from schedc_runtime.pipeline.step.contexts import (
    NOTHING,
    Undo,
    exact_sizes,
    isolated_counts,
    isolated_gradients,
    layers_over,
    own_parameters,
)
from schedc_runtime.pipeline.step.finite import GradientCheck
from schedc_runtime.pipeline.step.hot_steps import HotSteps
from schedc_runtime.pipeline.step.losses import Leftovers, StepResult, gathered, outputs_of, share
from schedc_runtime.pipeline.step.meeting_rows import RowChecks, candidates, meeting, mixing
from schedc_runtime.pipeline.step.parts import Parts, is_counted, parts_of_call
from schedc_runtime.pipeline.step.routing_record import begin_flags, collected_flags, held_layers
from schedc_runtime.pipeline.step.stage_copies import RunningStatistics, StageCopies
from schedc_runtime.pipeline.step.start import CallStart
from schedc_runtime.random_numbers.numbering import StepKey

if TYPE_CHECKING:
    from schedc_runtime.pipeline.step.step_graphs import StepGraphs


class StepRunner:
    """Runs the calls of one pipeline, and keeps what they leave for later calls."""

    def __init__(
        self, assembly: Assembly, check_finite: CheckFinite, count_fn: CountOfTargets, compare_copies: int = 0
    ) -> None:
        self.assembly, self.check_finite = assembly, bool(check_finite)
        self._gradients = GradientCheck(assembly, check_finite)
        self.count_fn = count_of_loss(assembly.head.loss_fn, count_fn)
        self.head, self.control = assembly.head, assembly.guard.control
        self.result: StepResult | None = None
        """The result of the last call."""
        self.steps = 0
        """Number of calls so far."""
        self.trained = 0
        """Number of training steps so far, which random numbers follow."""
        self.moves = 0
        """Number of times so far that experts of the model moved: the same on all ranks."""
        self.counted: bool | None = None
        """Whether the loss function returns a `Loss`; None before the first call that forms one."""
        self.accumulation = Accumulation()
        reads = assembly.partition.records.reads
        self.facts = StepFacts(reads, assembly.stages, assembly.mesh, assembly.device.type)
        self.intervals, self.traced, self.traced_step = dict[int, list[Interval]](), assembly.program, 0
        """When each instruction of the last traced step ran, by local rank of the first replica here. Its program."""
        self.snapshots = Snapshots(assembly)
        self._held_layers = held_layers(assembly)
        self.layers = [held.layer for held in self._held_layers]
        self._undo = Undo((x.module for x in assembly.held()), self.layers, generators=assembly.settings.rng == "torch")
        self.programs = CountedPrograms(assembly)
        self._foreseen: Any = None  # the signature for which streams of all given programs are bound
        self.hot = HotSteps(assembly.stages, assembly.program, assembly.mesh.experts, self.control)
        self._meeting, self._statistics = candidates(assembly.held()), RunningStatistics(assembly)
        self._rows = RowChecks(assembly)
        network, mesh = assembly.network, assembly.mesh
        self._replica, self._dims = assembly.places[0].replica, assembly.settings.dims
        cuts = cuts_sequences(assembly.settings.model, assembly.program)
        self._segments = assembly.program.segments if cuts else 1
        self._replicas_here = mesh.replicas if network.in_process else 1
        self._counting = 1 if network.in_process else mesh.replicas
        self._batches = GivenBatches(assembly.device.type != "cpu", assembly.mesh.context)
        self.start = CallStart(self.control, self._counting, self._batches)
        self.copies = StageCopies(assembly, self.control, compare_copies)
        self.watches: list[StepWatch] = []
        self.graphs: StepGraphs | None = None
        if assembly.settings.cut.graphs == "step":
            from schedc_runtime.pipeline.step.step_graphs import StepGraphs

            self.graphs = StepGraphs(assembly, self.layers)

    def run(self, call: PipelineCall, batch: Any, targets: Any) -> StepResult:
        """Agree on the batch, run the program, share the loss. batch, targets: [rows, ...] as of `Pipeline.step`."""
        guard, assembly, training = self.assembly.guard, self.assembly, call.training
        guard.check()
        check_materialized(self.assembly)
        self.steps += 1
        number = f"{call.name} {self.steps}"
        guard.between = f"between steps, behind {number}"
        with guard(f"starting {number}"):
            batch, targets = self._cut(call, batch, targets)
            agreed = self._agree(call, batch, targets)
            check_listed(assembly, agreed)
            program = self.programs.of(call.name, agreed.listed or call.microbatch_count, call.number)
            call = call if program is call.program else call._replace(program=program)
            if call.snapshot:
                call = call._replace(program=self.snapshots.begin(call.program))
            accumulation = self.accumulation.with_call(call.accumulate, agreed.total) if training else None
            executors = self._executors(call, agreed)
            self._check_form(call, agreed, targets)
            parts = parts_of_call(assembly, agreed, call.program.microbatches, batch, targets)
        if accumulation is not None:
            self.accumulation = Accumulation()  # what an error leaves behind
        outputs, everyone = self._run_fitting(call, number, executors, parts, accumulation, agreed)
        with guard(f"at the end of {number}, with the loss"):
            joined = self._joined(outputs, agreed) if outputs else None
            if not training and call.outputs and not agreed.has_targets:
                nothing = torch.full((), float("nan"), device=assembly.device)
                self.result = StepResult(nothing, nothing.new_empty(0), 0, {}, joined, tuple(sorted(outputs)))
                return self.result
            shared, counted = share(
                self.control, everyone, list(executors.values()), assembly.mesh.replicas,
                check_finite=self.check_finite, count=agreed.total if training else None,
                losses=self.head.losses,
            )  # fmt: skip
            self._gradients.refuse(everyone, call.program)
        if accumulation is not None:
            self._finish(accumulation, counted)
            self.hot.commit()
            for layer in self.layers:
                if layer.history is not None:
                    layer.history.note(layer.loads.chosen)
        self.counted = counted
        if training:
            self._end_training(number)
        loss = shared.loss.to(assembly.device)
        numbers = tuple(sorted(outputs))
        self.result = StepResult(loss, shared.losses, shared.count, shared.metrics, joined, numbers)
        return self.result

    def _cut(self, call: PipelineCall, batch: Any, targets: Any) -> tuple[Any, Any]:
        """Batch and targets [rows, ...] with sequences in segments, and Ragged fields cut by row, if there are such."""
        count = call.microbatch_count * self._replicas_here
        if self._segments > 1:
            batch, targets = segmented_call(batch, targets, count, self._segments, self._dims)
        return cut_batch(batch, count, self._dims), targets

    def _joined(self, outputs: dict[int, Any], agreed: Agreement) -> Any:
        """The outputs of a call [rows, ...], with whole sequences; of a list of microbatches, a list."""
        joined = outputs_of(outputs, listed=agreed.gives_lists)
        if self._segments == 1:
            return joined
        tokens = agreed.signature["fields"][POSITIONS]["shape"][-1]
        return whole_sequences(joined, len(outputs) // self._segments, self._segments, tokens)

    def _executors(self, call: PipelineCall, agreed: Agreement) -> dict[Any, Executor]:
        """The bound code of a call, by place here."""
        assembly, microbatches = self.assembly, call.program.microbatches
        assembly.first_batch.begin()
        name = f"{call.name} of {microbatches}" + f" by {call.number}" * (call.choice is not None)
        if call.choice is not None and agreed.signature is not self._foreseen:
            for number, other in enumerate(self.programs.given(microbatches)):  # no later step binds any
                self._bound(other, f"{call.name} of {microbatches} by {number}", agreed)
            self._foreseen = agreed.signature
        executors = self._bound(call.program, name + f" with {self.snapshots.key}" * bool(call.snapshot), agreed)
        if call.training:
            assembly.first_batch.check()
        return executors

    def _bound(self, program: Program, name: str, agreed: Agreement) -> dict[Any, Executor]:
        network, code = self.assembly.network, self.assembly.bound_code
        return code.executors(program, name, agreed.signature, network.transports, network.peer_groups)

    def _end_training(self, number: str) -> None:
        """Count a training step that has succeeded."""
        for watch in self.watches:
            with self.assembly.guard(f"behind {number}, comparing ranks"):
                watch.end(self.trained + 1)
        self.trained += 1
        if self.assembly.fused is not None:
            self.assembly.fused.warn_once()

    def _run_fitting(self, call: PipelineCall, number: str, *rest: Any) -> tuple[dict[int, Any], list[Any]]:
        """Run the program, and again with exact sizes if any rank had more rows than bounded buffers hold.

        Outputs by microbatch, and what every rank formed. rest: the other arguments of `_execute`.
        """
        bounded = self.assembly.plan.bound is not None
        if bounded:
            self._undo.begin(call.training)
        outputs, everyone, marks = self._run_once(call, number, *rest)
        if overflowed(marks):
            over = list(layers_over(self.layers, marks))
            self._undo.undo()
            with exact_sizes(self.layers):
                outputs, everyone, _ = self._run_once(call._replace(again=True), f"{number}, with exact sizes", *rest)
            for layer in over if call.training else ():
                layer.planner.overflowed += 1
        if bounded:
            self._undo.end()
        if self.graphs is not None:
            with self.assembly.guard(f"checking the graph of {number}"):
                self.graphs.check()
        return outputs, everyone

    def _run_once(self, call: PipelineCall, number: str, *rest: Any) -> tuple[dict[int, Any], list[Any], Marks]:
        """Run the program: outputs by microbatch, what every rank formed, and the flags of all layers."""
        guard, assembly = self.assembly.guard, self.assembly
        key = StepKey(assembly.settings.seed, self.trained, 0, call.name)
        written = self.graphs.written if self.graphs else ()
        with (
            guard(f"in {number}", partial=call.training),
            isolated_gradients(assembly.copied, assembly.weights.parameters(), written),
            isolated_counts(self.layers),
            random_numbers(assembly.stages, key, call.program.microbatches),
            self.hot.step(call.training),
            WEIGHTS.step() if self.layers else NOTHING,
        ):
            self._execute(call, *rest)
        with guard(f"at the end of {number}, sharing the loss"):
            formed, outputs = self.head.take()
            flags = collected_flags(self._held_layers)
            return outputs, *gathered(self.control, formed, flags, self._gradients.sums(call))

    def _execute(
        self,
        call: PipelineCall,
        executors: dict[Any, Executor],
        parts: Sequence[Parts],
        accumulation: Accumulation | None,
        agreed: Agreement,
    ) -> None:
        """Run the streams of all places here to their end, and check that nothing is left."""
        assembly, everyone = self.assembly, list(executors.values())
        assembly.guard.watch(everyone)
        if call.training:
            self._statistics.begin()
        begin, go = partial(self._begin, call, executors, accumulation), partial(self._go, call, everyone)
        if self.graphs is not None and self.graphs.serves(call):
            scales = call.scale, call.accumulate, accumulation and accumulation.guess
            name = f"{agreed.signature} {agreed.rows} {id(executors)} {scales}"
            self.graphs.run(name, everyone, parts, begin, go)
        else:
            begin(parts)
            go(parts)
        if left := [item for executor in everyone for item in executor.registers.leftovers()]:
            raise Leftovers(f"the program ended and left behind: {', '.join(left)}")
        for stage in assembly.held():
            stage.check_empty()
            stage.end_step()
            stage.take_losses()  # the head has them
        if call.training:
            self._statistics.combine()
        if call.trace:
            here = {place.pipeline: x.intervals or [] for place, x in executors.items() if place[1] == self._replica}
            self.traced, self.traced_step, self.intervals = call.program, self.trained + 1, here

    def _begin(
        self,
        call: PipelineCall,
        executors: dict[Any, Executor],
        accumulation: Accumulation | None,
        parts: Sequence[Parts],
    ) -> None:
        """Make ready for the first instruction."""
        microbatches = call.program.microbatches * self.assembly.mesh.replicas
        guess = accumulation.guess if accumulation else None
        loss_scale = call.scale / (microbatches * call.accumulate)
        self.head.begin(microbatches / guess if guess else None, keep_outputs=call.outputs, scale=loss_scale)
        for layer in self.layers:
            layer.loss_scale = loss_scale
        begin_flags(self._held_layers, call.program)
        for place, executor in executors.items():
            inputs, expected = parts[place.replica - self._replica]
            executor.start(
                inputs, expected, loss_scale, probing=self.check_finite, trace=call.trace, profile=call.profile
            )
        for watch in self.watches if call.training else ():
            watch.begin(list(executors.values()))

    def _go(self, call: PipelineCall, everyone: Sequence[Executor], parts: Sequence[Parts]) -> None:
        """Run all instructions."""
        named = partial(own_parameters, self.assembly) if call.training and not call.again else dict
        with graph_region(parts, named, counted=self.assembly.settings.rng == "torch"):
            if self.assembly.network.in_process:
                run_together(everyone)
            else:
                everyone[0].advance()
                everyone[0].finish()

    def _finish(self, accumulation: Accumulation, counted: bool) -> None:
        """Weigh the gradients by all targets of the calls that add up, once the last of these has run."""
        self.accumulation = accumulation
        if accumulation.last and counted:
            parameters = (p for stage in self.assembly.held() for p in stage.module.parameters())
            scale_gradients(parameters, accumulation.correction)

    def _agree(self, call: PipelineCall, batch: Any, targets: Any) -> Agreement:
        """What all ranks know of the call, with the signature of its batch."""
        if call.outputs and self.head.losses > 1:
            raise BatchRefused(
                f"outputs=True with {self.head.losses} losses in stages of their own: no stage has all outputs",
                "leave it out, or write one L in the last stage",
            )
        assembly, count, dims = self.assembly, None, self._dims
        last = assembly.holds(assembly.program.stages - 1)
        if call.training and last and targets is not None and self.counted is not False:
            count = counted(self.count_fn, targets)
        options = {"call": call.name, "scale": call.scale, "accumulate": call.accumulate, "outputs": call.outputs}
        options |= {"steps": self.trained, "snapshot": "yes" if call.snapshot else False}
        if call.microbatch_count != self.assembly.program.microbatches:
            options |= {"microbatches": call.microbatch_count}
        if call.choice is not None:
            options |= {"choice": f"{call.number} ({call.choice.name})"}
        options |= {"fixed": "; ".join(self.assembly.fixed) or False}
        shown = {"scale": call.scale, **{key: value for key, value in options.items() if value not in (1, False)}}
        records = assembly.partition.records
        signatures = signature_of_call(batch, dims, records), signature_of_call(targets)
        mine = StepRequest(
            *signatures, assembly.holds(0), assembly.forms_loss, {"call": call.name, **shown},
            has_loss=self.head.loss_fn is not None or not (call.training or targets is not None),
            replica=self._replica, counted=count, meeting=meeting(self._meeting, call.training),
            tied=self.assembly.weights.facts(call.training),
            digests=self.facts.digests(call.training, call.gradients),
            mixing=mixing(self.assembly.held(), call.training) if self.assembly.plan.row_slices else "",
            snapshot=self.snapshots.prepare(call.snapshot, self.trained) if call.snapshot else (),
            loaded=self.copies.loaded(call.training),
            facts=facts_of_call(batch, signatures[0], records),
        )  # fmt: skip
        what = f"the start of {call.name} {self.steps}"
        if not self.control.alone:
            self._batches.begin(f"{call.name} {self.steps}", batch, targets, call.orders)
        known = self.start.agree(what, mine, self.counted, lambda requests: self._checked(call, requests))
        if call.snapshot:
            self.snapshots.agree(known.snapshots)
        if call.training:
            self.copies.begin(self.trained, known.loaded)
        return known.agreement

    def _checked(self, call: PipelineCall, requests: Sequence[StepRequest]) -> Agreement:
        """What follows from the requests of all ranks. A collective; raises on every rank alike."""
        microbatches, here = call.microbatch_count, self._replicas_here
        agreed = agree_on_call(
            requests, self.control.names, call.microbatches, microbatches, here, self._counting, self.counted,
            self.assembly.plan.row_slices,
        )  # fmt: skip
        check_copies([copy for request in requests for copy in request.tied])
        names = self.control.names
        check_given(
            [(name, each.replica, each.given) for name, each in zip(names, requests, strict=True)],
            self._batches.context,
        )
        if different := differing([request.digests for request in requests]):
            facts = self.facts.facts(different, call.training, call.gradients)
            check_facts(self.control.gather("comparing what ranks must have alike", facts))
        self._rows.check(agreed, microbatches, here)
        return agreed

    def _check_form(self, call: PipelineCall, agreed: Agreement, targets: Any) -> None:
        """Refuse, on every rank, a batch that cannot be padded, and a `Loss` whose targets cannot be counted."""
        rows, counted = agreed.rows, self.counted
        padded = rows is not None and rows.padded and (call.training or agreed.has_targets)
        if padded and rows is not None:
            for spec in self.assembly.bound_code.boundaries[0][-1].tensors:
                if not spec.shape or spec.shape[0] != rows.size:
                    hidden = f"the model's output has a {spec}, which does not show its repeated rows"
                    raise not_padded_batch(agreed, self._replicas_here, hidden, "return outputs with the rows first")
        uncounted = call.training and agreed.total is None
        if counted is None and (padded or uncounted):
            what, mine = "what the loss function returns", self._form(call.program.microbatches, targets)
            counted = self.control.fold(what, mine, lambda forms: next((x for x in forms if x is not None), None))
        if padded and rows is not None and not counted:
            unseen = "what the loss function returns is not known before it has run once", "begin with a whole batch"
            why = unseen if counted is None else SCALAR
            raise not_padded_batch(agreed, self._replicas_here, *why)
        if uncounted and counted:
            raise BatchRefused(
                "loss_fn returns a `Loss`, and its count does not follow from the targets",
                "pass Pipeline(count_fn=...): it gives the count of the whole targets, before the step",
            )

    def _form(self, microbatches: int, targets: Any) -> bool | None:
        """Whether the loss function returns a `Loss`; None where this rank cannot tell."""
        here = self.assembly.holds(self.assembly.program.stages - 1)
        return is_counted(self.assembly, microbatches * self._replicas_here, targets) if here else None
