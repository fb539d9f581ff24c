"""What a trainer embeds: a model, a compiled program and a loss function become a training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedc.cell import CellCosts
from schedc.cell.issue_order import CellOnRank
from schedc.ir.program import Program
from schedc.layout.parts import Layout
from schedc.passes.forward_only import forward_only
from schedc.plan import Attachments, plan_of
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.cell_programs import CellSource, cell_source, cells_on_rank, check_cells
from schedc_runtime.execute.executor import Executor, Interval, run_together
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.partition import partition
from schedc_runtime.pipeline.agreement import check_fingerprints, fingerprint, plan_prints
from schedc_runtime.pipeline.apply_plan import (
    attach,
    check_plan,
    mesh_for,
    recompute_stages,
)
from schedc_runtime.pipeline.batch import StepRequest, agree, arguments, signature_of, split
from schedc_runtime.pipeline.bound import BoundCode
from schedc_runtime.pipeline.contexts import evaluating, isolated_gradients
from schedc_runtime.pipeline.guard import FailureGuard
from schedc_runtime.pipeline.losses import Leftovers, share_loss
from schedc_runtime.pipeline.router_bias import update_biases
from schedc_runtime.pipeline.stages import (
    copied_stages,
    device_of,
    layout_of,
    make_stages,
)
from schedc_runtime.pipeline.state import joined_state, load_state, whole_state
from schedc_runtime.ranks.mesh import Mesh, Place
from schedc_runtime.ranks.network import Network
from schedc_runtime.stage.stage import LossFunction, Stage

if TYPE_CHECKING:
    from schedc_runtime.data_parallel.fsdp import DenseSharding


class Pipeline:
    """Trains ``model`` by the instruction streams of ``program``, one process per rank.

        program = schedc.compile("dualpipev", P=4, M=16)
        pipe = Pipeline(model, program, loss_fn=loss_fn)
        loss = pipe.step(batch, targets)

    Every rank builds the whole model, equal on all ranks (same seed), and keeps the stages that the program places on
    it. Parameters and optimizer are ordinary torch; gradients add up until they are zeroed, as ever.

    loss_fn(output, target): the mean loss of one microbatch, a scalar. A step's loss is the mean over microbatches.
    costs, split_points, blocks, inputs: how the model is cut; see `partition`. layers: its ``layout``;
        that of the program if a plan gave it one, and nothing is said here.
    group: the process group of the pipeline's ranks (default: all processes); its backend carries the messages.
    mesh: several pipelines side by side that train the same weights, and which of them share their experts; default:
        one pipeline. Each replica brings a batch of its own, and gradients and loss are means over all of them.
    in_process: run all ranks here, without torch.distributed (tests, a single GPU). Always so for one rank. With a mesh
        a batch is that of all replicas, one after the other.
    timeout: seconds that a rank waits for another before the step fails and names what every rank waits on.
    check_finite: name the stage and microbatch that made the loss NaN or infinite.
    release_others: free the memory of the stages that other ranks hold; the model is then whole no longer.
    plan: what is attached to the schedule - expert ranks, how rows travel, overlap; that of the program if it was
        compiled from a plan, and nothing is said here.
    cell_costs: times of segments and exchanges by which overlapped cells are ordered, the same on all ranks.
    overlap: run stages in segments even in a model without expert layers.
    cells: the order of segments and exchanges inside an instruction; by default as the plan says.
    shard_dense: spread what is not an expert over the replicas of the mesh with FSDP2: parameters, their gradients and
        so the optimizer's state are DTensors between steps, gathered for the time in which a stage works.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        *,
        loss_fn: LossFunction,
        costs: Sequence[float] | None = None,
        split_points: Sequence[str] | None = None,
        blocks: str | None = None,
        inputs: Sequence[str] | None = None,
        layers: Layout | None = None,
        group: dist.ProcessGroup | None = None,
        mesh: Mesh | None = None,
        in_process: bool = False,
        timeout: float = 300.0,
        check_finite: bool = True,
        release_others: bool = False,
        plan: Attachments | None = None,
        cell_costs: CellCosts | None = None,
        overlap: bool = False,
        cells: CellSource | None = None,
        shard_dense: bool = False,
    ) -> None:
        self.program = program
        self.check_finite = check_finite
        # First, since other ranks take part in it: whatever fails below then fails on its own.
        self._device = device_of(model)
        self.plan = plan or plan_of(program)
        self.mesh = mesh_for(self.plan, program, mesh)
        if self.mesh.pipeline != program.ranks:
            raise RuntimeFault(
                f"the program is for {program.ranks} ranks, the mesh has {self.mesh.pipeline} in a pipeline"
            )
        self._network = Network(self.mesh, group, in_process, timeout, self._device)
        check_plan(self.plan, program, self.mesh)
        self.partition = partition(
            model,
            program.stages,
            costs=costs,
            split_points=split_points,
            layout=layers or layout_of(program),
            blocks=blocks,
            inputs=inputs,
            placement=program.placement,
        )
        self._names = {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}
        self._local = self._network.local
        self._shards: DenseSharding | None = None
        if shard_dense:
            from schedc_runtime.data_parallel.fsdp import DenseSharding  # FSDP2 takes a second to import

            self._shards = DenseSharding(program, self.mesh, self._local, self._network.in_process)
        self._stages = make_stages(self.partition, program, self._local, loss_fn, attach=self._attach, overlap=overlap)
        recompute_stages(self._stages.values(), self.plan, program)
        self._experts = [layer for stage in self._held() for _, layer in moe_layers(stage.module)]
        self._copied = [stage for place in self._local for stage in self._shared_stages(place)]
        """The stages here that another rank holds, too."""
        self._evaluation: Program | None = None
        cells = cells or cell_source(self.plan, cell_costs)
        self._cells: dict[str, CellOnRank] = {}
        for place in (place for place in self._local if place.replica == self.replica):
            made = cells_on_rank(program, place.pipeline, self._stages[place], cells)
            check_cells(program, place.pipeline, made, self._network.neighbours[place].experts)
            self._cells |= made
        self._bound_code = BoundCode(self.partition, self._stages, self.mesh, self._device, cells, self._shards)
        self._steps = 0
        self.intervals: dict[int, list[Interval]] = {}
        """Of the last step that was traced: per local rank of the first replica here, when each instruction ran."""
        self._guard = FailureGuard(self._network, timeout, self._bound_code, tuple(self._held()))
        self.control = self._guard.control
        if release_others:
            self.partition.release_others({stage.index for stage in self._held()})
        self._introduce()
        if self._shards is not None:
            self._shards.shard()
        self._guard.ready()

    @property
    def rank(self) -> int:
        """This process's rank on the pipeline axis; 0 if all ranks are here."""
        return self._local[0].pipeline

    @property
    def replica(self) -> int:
        """Which replica of the pipeline this process belongs to; 0 if all are here."""
        return self._local[0].replica

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of the mesh that are in this process: one, or with ``in_process`` all."""
        return tuple(self._local)

    def held(self, place: Place) -> tuple[Stage, ...]:
        """The stages of a place here."""
        return tuple(self._stages[place].values())

    def step(
        self, batch: Any = None, targets: Any = None, *, scale: float = 1.0, trace: bool = False, profile: bool = False
    ) -> Tensor:
        """One training step: forward and backward of all microbatches; gradients are added to ``parameter.grad``.

        batch: a tensor, a tuple (positional arguments of the model) or a dict (keywords), of tensors that are split
            along dimension 0 and of plain values. Needed on ranks that hold a first stage; others may pass None.
        targets: given to ``loss_fn``, split likewise. Needed where a last stage is held.
        scale: factor of the gradients, such as 1 / n when accumulating over n steps. The loss is without it.
        trace: keep when each instruction ran, in `intervals`. profile: name instructions in torch's profiler.

        Returns the mean loss over the microbatches, on every rank. Raises the same error on every rank:
        `BatchRefused` before anything is sent, `NonFiniteLoss`, `PeerFailure`, `StepTimeout`; an error of this rank's
        own instruction is an `InstructionError`.
        """
        with torch.enable_grad():
            return self._run("step", self.program, batch, targets, scale, trace, profile)

    def evaluate(self, batch: Any = None, targets: Any = None) -> Tensor:
        """The mean loss without training: the forward-only program, dropout off, nothing kept for a backward."""
        if self._evaluation is None:
            self._evaluation = forward_only(self.program)
        with torch.no_grad(), evaluating(self._held()):
            return self._run("evaluate", self._evaluation, batch, targets, 1.0, False, False)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the stages held here, each once, under the model's own names."""
        seen: set[int] = set()
        for stage in self._held():
            for name, parameter in stage.module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the stages held here."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        """Drop the gradients of the stages held here."""
        for parameter in self.parameters():
            parameter.grad = None

    def train(self, mode: bool = True) -> Pipeline:
        """Put the stages held here into training (or evaluation) mode; `evaluate` needs no call of this."""
        for stage in self._held():
            stage.module.train(mode)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of the stages held here, under the model's own names; of experts their part."""
        return {name: value for stage in self._held() for name, value in stage.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load the local part of a state dict of the whole model: of experts, too, that of the whole.

        strict: refuse a state dict that lacks a name of a stage held here, or has one that the model has not.
        """
        load_state(list(self._held()), state, self._names, self._shards, strict)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state on the CPU of rank 0, under the model's own names and in its order; {} elsewhere.

        A collective: all ranks must call it, between steps.
        """
        owner = {
            name: int(self.program.placement.rank_of_stage[0, stage])
            for stage, module in enumerate(self.partition.modules)
            for name in module.state_dict()
        }
        if self._network.in_process:
            mine = joined_state(self._stages, self.mesh.experts)
            return {name: mine[name].detach().cpu().clone() for name in self._names if name in mine}
        with self._guard("gathering the state dict"):
            self.control.gather("full_state_dict", None)
            mine = whole_state(self._held(), self._shards)
            gathered = self._network.gather_tensors(
                {name: (owner[name], *spec) for name, spec in self._names.items() if name in owner}, mine, self._device
            )
            return gathered if self.replica == 0 else {}

    def update_biases(self) -> None:
        """Move the routers' biases against the load since the last call, as loss-free balancing has it.

        Once per optimizer step, on all ranks: loads are summed over all replicas and copies of a stage. The layers'
        statistics begin anew.
        """
        with self._guard("updating the routers' biases"):
            update_biases(self.program, self._stages, self._network)

    def trace(self) -> dict[int, list[Interval]]:
        """When each instruction of the last traced step ran, on every rank, by one clock. A collective.

        Ranks on one machine share a clock; between machines it is as good as their clocks agree.
        """
        shift = time_ns() - perf_counter_ns()
        mine = {
            rank: [(x.row, x.rows, x.start + shift, x.end + shift, x.part) for x in spans]
            for rank, spans in self.intervals.items()
        }
        everyone = self.control.gather("collecting the trace", mine)
        return {int(rank): [Interval(*span) for span in spans] for part in everyone for rank, spans in part.items()}

    def close(self) -> None:
        """Give the model back as it was and leave the process group."""
        self.control.close()
        self._guard.forget()
        for stage in self._held():
            stage.release()
        self._network.close()

    def _held(self) -> Iterator[Stage]:
        return (stage for place in self._local for stage in self._stages[place].values())

    def _shared_stages(self, place: Place) -> list[Stage]:
        """The stages of a place that another rank holds, too: as their second copy, or in another replica."""
        held = self._stages[place]
        return (
            list(held.values())
            if self.mesh.replicas > 1
            else [held[i] for i in copied_stages(self.program, place.pipeline)]
        )

    def _attach(self, place: Place, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        near = self._network.neighbours[place]
        attach(modules, self.plan, near.experts, self.mesh, near.replicas)
        if self._shards is not None:
            self._shards.take(place, modules, self._device)

    def _introduce(self) -> None:
        """All ranks must run the same program on the same model: a mistake here would be a hang later."""
        self.control.meet()
        mine = {"mesh": repr(self.mesh), **plan_prints(self.plan, self._held())}
        mine |= fingerprint(self.program, self._names, self.partition.blocks, self._copied, self._cells)
        check_fingerprints(self.control.gather("building the pipeline", mine), self.control.names)

    def _run(
        self, call: str, program: Program, batch: Any, targets: Any, scale: float, trace: bool, profile: bool
    ) -> Tensor:
        self._guard.check()
        self._steps += 1
        self._guard.between = f"between steps, behind {call} {self._steps}"
        with self._guard(f"starting {call} {self._steps}"):
            batches, wanted = self._own(batch), self._own(targets)
            signature = self._agree(call, batches[0], wanted[0], scale)
            placed = self._bound_code.executors(
                program, call, signature, self._network.transports, self._network.neighbours
            )
            executors = list(placed.values())
            parts = [self._split(*pair) for pair in zip(batches, wanted, strict=True)]
        with self._guard(f"in {call} {self._steps}", partial=torch.is_grad_enabled()), isolated_gradients(self._copied):
            self._guard.watch(executors, evaluating=call == "evaluate")
            for layer in self._experts:
                layer.loss_scale = scale / (program.microbatches * self.mesh.replicas)
            for place, executor in placed.items():
                inputs, expected = parts[place.replica - self.replica]
                executor.start(
                    inputs, expected, scale / (program.microbatches * self.mesh.replicas),
                    probing=self.check_finite, trace=trace, profile=profile,
                )  # fmt: skip
            self._execute(executors)
            if trace:
                first = [(place.pipeline, x) for place, x in placed.items() if place.replica == self.replica]
                self.intervals = {rank: executor.intervals or [] for rank, executor in first}
        with self._guard(f"at the end of {call} {self._steps}, sharing the loss"):
            losses = {
                place.replica * program.microbatches + m: loss
                for place, held in self._stages.items()
                for stage in held.values()
                for m, loss in stage.take_losses().items()
            }
            return share_loss(self.control, losses, executors, self.mesh.replicas, self.check_finite).to(self._device)

    def _execute(self, executors: list[Executor]) -> None:
        if self._network.in_process:
            run_together(executors)
        else:
            executors[0].advance()
            executors[0].finish()
        if left := [item for executor in executors for item in executor.registers.leftovers()]:
            raise Leftovers(f"the program ended and left behind: {', '.join(left)}")
        for stage in self._held():
            stage.check_empty()
            stage.end_step()

    def _agree(self, call: str, batch: Any, targets: Any, scale: float) -> Any:
        """The batch's signature, known to all ranks."""
        mine = StepRequest(
            signature_of(batch), signature_of(targets), self._holds(0), self._holds(self.program.stages - 1),
            {"call": call, "scale": scale},
        )  # fmt: skip
        answers = self.control.gather(f"the start of {call} {self._steps}", mine)
        requests = [StepRequest(*answer) for answer in answers]
        return agree(requests, self.control.names, self.program.microbatches)

    def _own(self, value: Any) -> list[Any]:
        """What each replica here is given: all in one process, a batch is that of all replicas."""
        if value is None or not self._network.in_process or self.mesh.replicas == 1:
            return [value] * (self.mesh.replicas if self._network.in_process else 1)
        request = StepRequest(signature_of(value), None, True, False, "")
        agree([request], self.control.names, self.program.microbatches, self.mesh.replicas)
        return split(value, self.mesh.replicas, self._device)

    def _split(self, batch: Any, targets: Any) -> tuple[list[tuple[Tensor, ...]] | None, list[Any] | None]:
        """[M] tensors that enter the first stage and [M] targets; None where no stage here wants them."""
        microbatches, inputs, parts = self.program.microbatches, None, None
        if batch is not None and self._holds(0):
            entry = self._bound_code.boundaries[0]
            pieces = split(batch, microbatches, self._device)
            inputs = [entry.pack(self.partition.bind(*arguments(piece))) for piece in pieces]
        if targets is not None and self._holds(self.program.stages - 1):
            parts = split(targets, microbatches, self._device)
        return inputs, parts

    def _holds(self, index: int) -> bool:
        return any(stage.index == index for stage in self._held())
