"""What a trainer embeds: a model, a compiled program and a loss function become a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedc.cell import CellCosts
from schedc.ir.program import Program
from schedc.plan import Plan
from schedc_runtime.device.limits import check_seconds
from schedc_runtime.execute.executor import Interval
from schedc_runtime.execute.micro_steps import CellSource
from schedc_runtime.moe.kernels import Kernels
from schedc_runtime.pipeline.agree.counts import CountOfTargets
from schedc_runtime.pipeline.build.apply_plan import told_buffers
from schedc_runtime.pipeline.build.assemble import assemble
from schedc_runtime.pipeline.build.assembly import Cut, Settings, check_kinds
from schedc_runtime.pipeline.build.chunked_loss import LossOfMicrobatch
from schedc_runtime.pipeline.build.loss_function import labels_counted
from schedc_runtime.pipeline.build.materialize import CheckpointSource, check_materialized, materialize
from schedc_runtime.pipeline.build.parallelize import ParallelizeStage, parallelize
from schedc_runtime.pipeline.optimizer_calls import OptimizerCalls
from schedc_runtime.pipeline.state.report import collected_trace, report, told_graphs
from schedc_runtime.pipeline.state.snapshots import Snapshot, Wanted
from schedc_runtime.pipeline.state.state import gather_state, load_state
from schedc_runtime.pipeline.step.call import Auditor, CheckFinite, PipelineCall, ProgramChoice
from schedc_runtime.pipeline.step.contexts import evaluating
from schedc_runtime.pipeline.step.losses import StepResult
from schedc_runtime.pipeline.step.routing_record import RoutingRecord
from schedc_runtime.pipeline.step.step import StepRunner
from schedc_runtime.providers import NamedProviders
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.stage.stage import Stage
from schedc_runtime.transport.priorities import told

if TYPE_CHECKING:
    from schedc_runtime.capture.check import CaptureReport
    from schedc_runtime.materialize.values import Rule


class Pipeline(OptimizerCalls):
    """Trains ``model`` by the instruction streams of ``program``, one process per rank.

        program = schedc.compile("dualpipev", P=4, M=16)
        pipe = Pipeline(model, program, loss_fn=loss_fn)
        loss = pipe.step(batch, targets)

    Every rank builds the whole model, equal on all ranks (same seed), and keeps the stages that the program places on
    it. Parameters and optimizer are ordinary torch: gradients add up until they are zeroed. A model on the meta device
    takes no memory; each rank makes its own stages with `materialize`.

    loss_fn(output, target): the mean loss of one microbatch, a scalar; a step's loss is the mean over microbatches. Or
        a `Loss`, a sum with its count; a step's loss is then the mean over what is counted. Or a tuple with a function
        for each output of the model, whose means are added. None: evaluation alone.
    count_fn(targets): how many targets of a whole batch a `Loss` counts; by default labels other than -100.
    cut: how the model is cut into stages; by default as the program's layout says, else by parameters.
    mesh: several pipelines side by side that train the same weights, and which of them share their experts; by default
        one pipeline. Each replica brings a batch of its own. Gradients and loss are means over all replicas.
    plan: what is attached to the schedule: expert ranks, how rows travel, recomputation, overlap; by default what the
        program was compiled with.
    cells: the order inside overlapped instructions, the same on all ranks; by default as the plan says. Times of
        segments and exchanges to order by, or a function that gives each cell's program.
    kernels: `Costs.kernels` of a cost file: who multiplies how many rows of experts, where the plan names nobody.
    providers: who does a part of the step, by kind: ``{"exchange": "deep_ep"}``, ``"products"``, ``"loss"``,
        ``"norm"``.
    tensor_plan: how tensor ranks split products, a style by name: ``{"layers.*.mlp.up": "colwise", ...}``. By default
        the model's own ``_tp_plan``, as models of Transformers have it. Used where the mesh has tensor ranks.
    telemetry: a tracer of OpenTelemetry, which gets each training step and its instructions as spans.
    group: the process group of the pipeline's ranks; by default all processes. Its backend carries the messages.
    in_process: run all ranks here, without torch.distributed; one rank always runs so. A batch has all replicas' rows.
    device: where a model on the meta device will be; by default as `deferred` says, else the GPU under NCCL.
    rng: how the forward draws random numbers. ``"by name"``: as a function of ``seed``, `steps`, microbatch and module.
        ``"torch"``: from torch's generators as they stand, which gives other numbers with every number of ranks.
    timeout: seconds that a rank waits for another or its device, at most; in a step 20 times the longest, at least 30.
    check_finite: refuse a loss or gradients that are NaN or infinite, and name the stage; ``"loss"``: the loss alone.
    compare_copies: number of steps between comparisons of parameters that several ranks hold; 0: never.
    audit: an `Audit`, by which other ranks repeat microbatches to prove which device computes wrongly.
    example: a batch as of `step`, of which only shapes and plain values count: the model is cut by its operations on
        this batch. By default the dummy inputs of a Hugging Face model, or a guess by the model's layers.
    example_dims: dimension of rows by argument, where it is not 0: ``{"position_ids": 1}``; None where all share one.
    others: further programs of the same stages on the same ranks, of which `step` may run one: ``choice``.
    compile: True, or `torch.compile`'s keywords as a dict: ``{"mode": ..., "fullgraph": True, "dynamic": ...}``.
        Each unit of a stage becomes one graph, and its backward two: for I and W. The backend is ``"inductor"``, or
        ``"aot_eager"`` without a compiler; others compute all weight gradients in I.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        *,
        loss_fn: LossOfMicrobatch | Sequence[LossOfMicrobatch] | None,
        count_fn: CountOfTargets = labels_counted,
        cut: Cut | None = None,
        mesh: Mesh | None = None,
        plan: Plan | None = None,
        cells: CellCosts | CellSource | None = None,
        group: dist.ProcessGroup | None = None,
        in_process: bool = False,
        device: torch.device | str | None = None,
        rng: str = "by name",
        seed: int = 0,
        timeout: float = 300.0,
        check_finite: CheckFinite = True,
        compare_copies: int = 100,
        audit: Auditor | None = None,
        example: Any = None,
        example_dims: Mapping[str, int | None] | None = None,
        compile: bool | Mapping[str, Any] | None = None,
        kernels: Kernels = (),
        providers: Mapping[str, str] | None = None,
        tensor_plan: Mapping[str, str] | None = None,
        telemetry: Any = None,
        others: Sequence[Program] = (),
    ) -> None:
        check_kinds(model=model, program=program, loss_fn=loss_fn, count_fn=count_fn, cut=cut, mesh=mesh, others=others)
        check_seconds("timeout", timeout)
        place = None if device is None else torch.device(device)
        settings = (model, program, loss_fn, cut or Cut(), mesh, plan, cells, group, in_process, timeout)
        more = (place, rng, seed, example, example_dims, compile, tuple(kernels), NamedProviders.of(providers))
        assembly = assemble(Settings(*settings, *more, tensor_plan, tuple(others)))
        self.program, self.plan, self.mesh = assembly.program, assembly.plan, assembly.mesh
        self.partition, self.control, self._network = assembly.partition, assembly.guard.control, assembly.network
        self._assembly, self._guard, self._bound_code = assembly, assembly.guard, assembly.bound_code
        self._local, self._stages = assembly.places, assembly.stages
        self._runner = StepRunner(assembly, check_finite, count_fn, compare_copies)
        if telemetry is not None:
            from schedc_runtime.telemetry import StepSpans

            self._runner.watches.append(StepSpans(telemetry, assembly.places, self._runner.graphs is not None))
        if audit is not None:
            audit.watch(self)

    @property
    def steps(self) -> int:
        """Number of training steps so far: calls of `step` that succeeded. Set it when a run goes on."""
        return self._runner.trained

    @steps.setter
    def steps(self, steps: int) -> None:
        self._runner.trained = steps

    @property
    def intervals(self) -> dict[int, list[Interval]]:
        """When each instruction of the last traced step ran, by local rank of the first replica here."""
        return self._runner.intervals

    @property
    def result(self) -> StepResult | None:
        """The result of the last step or evaluation, without outputs unless it was asked for them; None before."""
        return self._runner.result

    @property
    def rank(self) -> int:
        """This process's rank on the pipeline axis; 0 if all ranks are here."""
        return self._local[0].pipeline

    @property
    def replica(self) -> int:
        """Which replica of the pipeline this process belongs to; 0 if all are here."""
        return self._local[0].replica

    @property
    def places(self) -> tuple[Coordinate, ...]:
        """The places of the mesh that are in this process: one, or with ``in_process`` all."""
        return tuple(self._local)

    def held(self, place: Coordinate) -> tuple[Stage, ...]:
        """The stages of a place here."""
        return tuple(self._stages[place].values())

    def materialize(
        self, seed: int = 0, *, checkpoint: CheckpointSource | None = None, init: Rule | None = None
    ) -> None:
        """Give the stages here of a model on the meta device their values. A collective: all ranks must call it.

        seed: random numbers of a tensor follow from it and from the tensor's name. Values are then the same for any
            number of ranks.
        checkpoint: a safetensors or torch file, its index, a directory of either, a DCP directory, a run's or step's
            folder, or the whole model's state dict [...]. Only what is held here is read.
        init: ``init(name, tensor)`` writes a parameter [...] or returns its values. Without it, or where it does
            neither, parameters begin as the model's own code says. With a checkpoint, ``init`` is for missing names.

        Parameters stay the same objects, with their hooks. Raises `MaterializeError` on every rank alike.
        """
        materialize(self._assembly, seed, checkpoint, init)

    @overload
    def step(self, batch: Any = None, targets: Any = None, *, outputs: Literal[False] = False, scale: float = 1.0,
             accumulate: int = 1, microbatches: int | None = None, snapshot: Wanted = False, trace: bool = False,
             profile: bool = False, choice: ProgramChoice | None = None) -> Tensor: ...  # fmt: skip

    @overload
    def step(self, batch: Any = None, targets: Any = None, *, outputs: Literal[True], scale: float = 1.0,
             accumulate: int = 1, microbatches: int | None = None, snapshot: Wanted = False, trace: bool = False,
             profile: bool = False, choice: ProgramChoice | None = None) -> StepResult: ...  # fmt: skip

    def step(
        self, batch: Any = None, targets: Any = None, *, outputs: bool = False, scale: float = 1.0, accumulate: int = 1,
        microbatches: int | None = None, snapshot: Wanted = False, trace: bool = False, profile: bool = False,
        choice: ProgramChoice | None = None,
    ) -> Tensor | StepResult:  # fmt: skip
        """One training step: forward and backward of all microbatches; gradients are added to ``parameter.grad``.

        batch: [rows, ...] a tensor, or a tuple (positional arguments of the model) or dict (keywords) of tensors and
            plain values. Tensors are split by rows. Needed on ranks that hold a first stage; others may pass None. Rows
            that do not divide into microbatches are padded where that changes nothing, else refused. A list has these
            for each microbatch, of up to 8 shapes; nothing is padded.
        targets: [rows, ...] given to ``loss_fn``, split or listed likewise. Needed where a last stage is held.
        outputs: return a `StepResult`, which has the model's outputs where a last stage is.
        scale: factor of the gradients, such as that of a gradient scaler. The loss is without it.
        accumulate: number of calls whose gradients make one step of the optimizer, the same in each of them. The
            gradients are those of one mean over all of these calls once the last has run. Begin with zeroed gradients.
        microbatches: number of them in this step; by default as in a list, or `program`. A new one is compiled once.
        choice: the program of this step and the order of its microbatches, as `RowLoader.choice`, alike on all ranks.
        snapshot: copy the state to the host beside the step's compute, for `snapshot`; an optimizer: and its state.
        trace: keep when each instruction ran, in `intervals`. profile: name instructions in torch's profiler.

        Returns [] the loss, on every rank. Raises the same error on every rank: `BatchRefused` before anything is sent,
        `NonFiniteStep`, `PeerFailure`, `StepTimeout`. An error of this rank's own instruction is an `InstructionError`.
        """
        gradients = torch.is_grad_enabled()
        options = scale, accumulate, outputs, trace, profile, gradients, snapshot
        call = PipelineCall("step", self.program, *options, microbatches=microbatches, choice=choice)
        torch._C._set_grad_enabled(True)
        try:
            result = self._runner.run(call, batch, targets)
        finally:
            torch._C._set_grad_enabled(gradients)
        return result if outputs else result.loss

    @overload
    def evaluate(self, batch: Any = None, targets: Any = None, *, outputs: Literal[False] = False,
                 microbatches: int | None = None) -> Tensor: ...  # fmt: skip

    @overload
    def evaluate(
        self, batch: Any = None, targets: Any = None, *, outputs: Literal[True], microbatches: int | None = None
    ) -> StepResult: ...

    def evaluate(
        self, batch: Any = None, targets: Any = None, *, outputs: bool = False, microbatches: int | None = None
    ) -> Tensor | StepResult:
        """[] the loss without training: the forward-only program, dropout off, nothing kept for a backward.

        batch to microbatches: as of `step`. With ``outputs`` targets may be left out; the loss is then NaN.
        """
        call = PipelineCall("evaluate", self.program, outputs=outputs, microbatches=microbatches)
        with torch.no_grad(), evaluating(self._held()):
            result = self._runner.run(call, batch, targets)
        return result if outputs else result.loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the stages held here, each once, under the names of ``model.named_parameters()``."""
        seen: set[int] = set()
        first = self.partition.first_names
        for stage in self._held():
            for name, parameter in stage.module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield first.get(name, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the stages held here."""
        return (parameter for _, parameter in self.named_parameters())

    def parallelize(self, function: ParallelizeStage) -> None:
        """Call ``function(stage module, mesh)`` for every stage held here: FSDP2, compilation, or your own changes.

            pipe.parallelize(lambda stage, mesh: fully_shard(stage, mesh=mesh["dp"]))

        mesh: torch's device mesh with the axes ``pp`` and ``dp``; None where all ranks are in one process. A collective
        of all ranks. Make the optimizer afterwards. What `fully_shard` has sharded is gathered and freed by the
        instruction stream, as with `Mesh(shard_dense=True)`.
        """
        parallelize(self._assembly, function)
        self.program = self._assembly.program
        self._runner.programs.forget()
        self._runner.facts.refresh()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The stage modules held here, in order of stages; with ``in_process`` those of all ranks."""
        return tuple(stage.module for stage in self._held())

    def train(self, mode: bool = True) -> Pipeline:
        """Put the stages held here into training (or evaluation) mode; `evaluate` needs no call of this."""
        for stage in self._held():
            stage.module.train(mode)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of the stages held here, under the model's own names; only the experts held here."""
        check_materialized(self._assembly)
        return {name: value for stage in self._held() for name, value in stage.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load the local part of a state dict of the whole model, which has all experts.

        strict: refuse a state dict that lacks a name of a stage held here, or has one that the model has not.
        """
        check_materialized(self._assembly)
        load_state(self._assembly, state, strict)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state on the CPU of rank 0, under the model's own names and in its order; {} elsewhere.

        A collective: all ranks must call it, between steps.
        """
        check_materialized(self._assembly)
        return gather_state(self._assembly)

    def snapshot(self) -> Snapshot:
        """The state of the stages held here before the last step with ``snapshot``. Raises `StageError` without one."""
        return self._runner.snapshots.read()

    def balance_state(self) -> dict[str, list[list[int]]]:
        """The copies of experts in the next step, which follow the last one's rows: for a checkpoint, as JSON.

        A collective, between steps. By pipeline rank, expert group, stage and layer: [ranks of the group] the experts
        of which each rank has copies. Empty without copies by step (`hot`, `balance by step`).
        """
        return self._runner.hot.state()

    def load_balance_state(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Go on with the `balance_state` of a checkpoint, so that the next step has the same bits. A collective.

        Raises `RuntimeFault` for that of another plan, mesh or model.
        """
        self._runner.hot.load(state)

    def report(self) -> str:
        """The choices of the pipeline for the stages here: who multiplies and carries rows in each MoE layer, and why.

        Under autocast another provider may run. Sizes that the plan does not say are the model's, with a line for each.
        """
        lines = [report(self.modules, self.plan), *told(self.mesh.high_priority, self._assembly.device)]
        lines += [*told_graphs(self._held(), self._runner.graphs), *told_buffers(self._assembly.lanes)]
        lines += [
            line for changed in (self._assembly.fused, self._assembly.norms) if changed for line in changed.told()
        ]
        return "\n".join(line for line in lines if line)

    def explain_capture(self, first: Any, second: Any) -> CaptureReport:
        """What a graph of a step cannot hold, from steps with two batches and their targets, undone. A collective."""
        from schedc_runtime.pipeline.step.explain import explained

        return explained(self._runner, PipelineCall("step", self.program), first, second)

    def record_routing(self) -> RoutingRecord:
        """Records the rows of each rank's experts in the steps that run inside ``with``, for predictions.

        ``with pipe.record_routing() as record: pipe.step(...)``, then ``record.save("routing.npz")`` on all ranks.
        """
        return RoutingRecord(self._assembly, self.program)

    def trace(self) -> dict[int, list[Interval]]:
        """When each instruction of the first replica's last traced step ran, in ns by rank. A collective."""
        return collected_trace(self.control, self.intervals)

    def close(self) -> None:
        """Give the model back as it was and leave the process group."""
        self.control.close()
        self._guard.forget()
        for stage in self._held():
            stage.release()
        for changed in (self._assembly.compiled, self._assembly.fused, self._assembly.norms):
            if changed is not None:
                changed.release()
        for lanes in self._assembly.lanes:
            lanes.close()
        self._network.close()

    def _held(self) -> Iterator[Stage]:
        return self._assembly.held()
