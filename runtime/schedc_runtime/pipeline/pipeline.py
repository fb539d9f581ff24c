"""What a trainer embeds: a model, a compiled program and a loss function become a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import perf_counter_ns, time_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedc.cell import CellCosts
from schedc.ir.program import Program
from schedc.passes.forward_only import forward_only
from schedc.plan import Attachments
from schedc_runtime.execute.cell_programs import CellSource
from schedc_runtime.execute.executor import Executor, Interval, run_together
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.pipeline.assemble import Settings, assemble
from schedc_runtime.pipeline.batch import StepRequest, agree, arguments, signature_of, split
from schedc_runtime.pipeline.contexts import evaluating, isolated_gradients
from schedc_runtime.pipeline.cut import Cut
from schedc_runtime.pipeline.losses import Leftovers, share_loss
from schedc_runtime.pipeline.old_keywords import Groups, grouped
from schedc_runtime.pipeline.router_bias import update_biases
from schedc_runtime.pipeline.state import gather_state, load_state
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.stage.stage import LossFunction, Stage


class Pipeline:
    """Trains ``model`` by the instruction streams of ``program``, one process per rank.

        program = schedc.compile("dualpipev", P=4, M=16)
        pipe = Pipeline(model, program, loss_fn=loss_fn)
        loss = pipe.step(batch, targets)

    Every rank builds the whole model, equal on all ranks (same seed), and keeps the stages that the program places on
    it. Parameters and optimizer are ordinary torch: gradients add up until they are zeroed.

    loss_fn(output, target): the mean loss of one microbatch, a scalar. A step's loss is the mean over microbatches.
    cut: how the model is cut into stages; by default as the program's layout says, else by parameters.
    mesh: several pipelines side by side that train the same weights, and which of them share their experts; by default
        one pipeline. Each replica brings a batch of its own. Gradients and loss are means over all replicas.
    plan: what is attached to the schedule: expert ranks, how rows travel, recomputation, overlap; by default what the
        program was compiled with.
    cells: the order inside overlapped instructions, the same on all ranks; by default as the plan says. Times of
        segments and exchanges to order by, or a function that gives each cell's program.
    group: the process group of the pipeline's ranks; by default all processes. Its backend carries the messages.
    in_process: run all ranks here, without torch.distributed (tests, a single GPU). One rank always runs so.
        A batch is then that of all replicas, one after the other.
    timeout: seconds that a rank waits for another before the step fails and names what every rank waits on.
    check_finite: name the stage and microbatch that made the loss NaN or infinite.

    Other keywords are those of the release before, see `schedc_runtime.pipeline.old_keywords`.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        *,
        loss_fn: LossFunction,
        cut: Cut | None = None,
        mesh: Mesh | None = None,
        plan: Attachments | None = None,
        cells: CellCosts | CellSource | None = None,
        group: dist.ProcessGroup | None = None,
        in_process: bool = False,
        timeout: float = 300.0,
        check_finite: bool = True,
        **old: Any,
    ) -> None:
        groups = grouped(Groups(cut or Cut(), mesh, cells), old, program, plan)
        assembly = assemble(
            Settings(model, program, loss_fn, groups.cut, groups.mesh, plan, groups.cells, group, in_process, timeout)
        )
        self.program, self.check_finite = program, check_finite
        self.plan, self.mesh, self.partition = assembly.plan, assembly.mesh, assembly.partition
        self.control = assembly.guard.control
        self.intervals: dict[int, list[Interval]] = {}
        """When each instruction of the last traced step ran, by local rank of the first replica here."""
        self._assembly, self._guard, self._bound_code = assembly, assembly.guard, assembly.bound_code
        self._network, self._device = assembly.network, assembly.device
        self._local, self._stages, self._copied = assembly.places, assembly.stages, assembly.copied
        self._experts = [layer for stage in self._held() for _, layer in moe_layers(stage.module)]
        self._evaluation: Program | None = None
        self._steps = 0

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

    def step(
        self, batch: Any = None, targets: Any = None, *, scale: float = 1.0, trace: bool = False, profile: bool = False
    ) -> Tensor:
        """One training step: forward and backward of all microbatches; gradients are added to ``parameter.grad``.

        batch: [rows, ...] a tensor, or a tuple (positional arguments of the model) or dict (keywords) of tensors and
            plain values. Tensors are split along dimension 0. Needed on ranks that hold a first stage; others may pass
            None.
        targets: [rows, ...] given to ``loss_fn``, split likewise. Needed where a last stage is held.
        scale: factor of the gradients, such as 1 / n when accumulating over n steps. The loss is without it.
        trace: keep when each instruction ran, in `intervals`.
        profile: name instructions in torch's profiler.

        Returns [] the mean loss over the microbatches, on every rank. Raises the same error on every rank:
        `BatchRefused` before anything is sent, `NonFiniteLoss`, `PeerFailure`, `StepTimeout`. An error of this rank's
        own instruction is an `InstructionError`.
        """
        with torch.enable_grad():
            return self._run("step", self.program, batch, targets, scale, trace, profile)

    def evaluate(self, batch: Any = None, targets: Any = None) -> Tensor:
        """[] the mean loss without training: the forward-only program, dropout off, nothing kept for a backward.

        batch, targets: as of `step`.
        """
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
        """Parameters and buffers of the stages held here, under the model's own names; only the experts held here."""
        return {name: value for stage in self._held() for name, value in stage.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load the local part of a state dict of the whole model, which has all experts.

        strict: refuse a state dict that lacks a name of a stage held here, or has one that the model has not.
        """
        load_state(self._assembly, state, strict)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state on the CPU of rank 0, under the model's own names and in its order; {} elsewhere.

        A collective: all ranks must call it, between steps.
        """
        return gather_state(self._assembly)

    def update_biases(self) -> None:
        """Move the routers' biases against the load since the last call (loss-free balancing).

        Call it once per optimizer step, on all ranks: loads are summed over all replicas and copies of a stage. The
        layers' statistics begin anew.
        """
        with self._guard("updating the routers' biases"):
            update_biases(self.program, self._stages, self._network)

    def trace(self) -> dict[int, list[Interval]]:
        """When each instruction of the last traced step ran, in ns of one clock, by rank. A collective.

        Ranks on one machine share a clock. Between machines times are as good as their clocks agree.
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
        return self._assembly.held()

    def _run(
        self, call: str, program: Program, batch: Any, targets: Any, scale: float, trace: bool, profile: bool
    ) -> Tensor:
        """A step or an evaluation (``call``): agree on the batch, run the program, share the loss."""
        self._guard.check()
        self._steps += 1
        self._guard.between = f"between steps, behind {call} {self._steps}"
        with self._guard(f"starting {call} {self._steps}"):
            batches, expected = self._by_replica(batch), self._by_replica(targets)
            signature = self._agree(call, batches[0], expected[0], scale)
            executors = self._bound_code.executors(
                program, call, signature, self._network.transports, self._network.peer_groups
            )
            parts = [self._split(*pair) for pair in zip(batches, expected, strict=True)]
        with self._guard(f"in {call} {self._steps}", partial=torch.is_grad_enabled()), isolated_gradients(self._copied):
            self._guard.watch(list(executors.values()), evaluating=call == "evaluate")
            loss_scale = scale / (program.microbatches * self.mesh.replicas)
            for layer in self._experts:
                layer.loss_scale = loss_scale
            for place, executor in executors.items():
                inputs, wanted = parts[place.replica - self.replica]
                executor.start(inputs, wanted, loss_scale, probing=self.check_finite, trace=trace, profile=profile)
            self._execute(list(executors.values()))
            if trace:
                first = [(place.pipeline, x) for place, x in executors.items() if place.replica == self.replica]
                self.intervals = {rank: executor.intervals or [] for rank, executor in first}
        with self._guard(f"at the end of {call} {self._steps}, sharing the loss"):
            losses = self._take_losses(program)
            shared = share_loss(self.control, losses, list(executors.values()), self.mesh.replicas, self.check_finite)
            return shared.to(self._device)

    def _take_losses(self, program: Program) -> dict[int, Tensor]:
        """The losses formed here, by microbatch; those of replica r from r * M on."""
        return {
            place.replica * program.microbatches + microbatch: loss
            for place, held in self._stages.items()
            for stage in held.values()
            for microbatch, loss in stage.take_losses().items()
        }

    def _execute(self, executors: list[Executor]) -> None:
        """Run the streams of all places here to their end, and check that nothing is left."""
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
        """The batch's signature, on which all ranks agree."""
        mine = StepRequest(
            signature_of(batch), signature_of(targets), self._holds(0), self._holds(self.program.stages - 1),
            {"call": call, "scale": scale},
        )  # fmt: skip
        answers = self.control.gather(f"the start of {call} {self._steps}", mine)
        requests = [StepRequest(*answer) for answer in answers]
        return agree(requests, self.control.names, self.program.microbatches)

    def _by_replica(self, value: Any) -> list[Any]:
        """The part of a batch that each replica here takes. In one process a batch is that of all replicas."""
        if value is None or not self._network.in_process or self.mesh.replicas == 1:
            return [value] * (self.mesh.replicas if self._network.in_process else 1)
        request = StepRequest(signature_of(value), None, True, False, "")
        agree([request], self.control.names, self.program.microbatches, self.mesh.replicas)
        return split(value, self.mesh.replicas, self._device)

    def _split(self, batch: Any, targets: Any) -> tuple[list[tuple[Tensor, ...]] | None, list[Any] | None]:
        """[M] tensors that enter the first stage, and [M] targets; None where no stage here needs them."""
        microbatches, inputs, parts = self.program.microbatches, None, None
        if batch is not None and self._holds(0):
            entry = self._bound_code.boundaries[0]
            pieces = split(batch, microbatches, self._device)
            inputs = [entry.pack(self.partition.bind(*arguments(piece))) for piece in pieces]
        if targets is not None and self._holds(self.program.stages - 1):
            parts = split(targets, microbatches, self._device)
        return inputs, parts

    def _holds(self, index: int) -> bool:
        """Whether stage ``index`` is here."""
        return any(stage.index == index for stage in self._held())
