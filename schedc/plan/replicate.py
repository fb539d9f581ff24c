"""Prices what replicas do together in a step: sums of gradients, and gathers of parameters that a plan shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.arrays import Floats
from schedc.ir.contradictions import MOST_ZERO
from schedc.ir.plan import Plan, bytes_per_number
from schedc.ir.schedule import Schedule
from schedc.ir.ties import lies_apart
from schedc.ir.works import WorkGroup, WorkLane
from schedc.plan.counts.parameters import expert_share, parameter_bytes
from schedc.plan.directives.base import Directives
from schedc.plan.held_memory import HeldMemory
from schedc.plan.layout.costs import LayerCosts
from schedc.plan.layout.parts import WORK, PartKind
from schedc.plan.peak_memory import MemoryBesideWorks, check_memory
from schedc.plan.place_works import Offloading
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import RankBytes
from schedc.step.placed_works import PlacedWorks
from schedc.step.timeline import CellTimes
from schedc.step.work_runs import StepWorks
from schedc.step.works.place_replica_works import ReplicaBytes, ShardingRoom, lane_times, place_replica_works
from schedc.units import amount

_GIGABYTE = 1e9


@dataclass(frozen=True, eq=False)
class Replication(StepWorks):
    """The works of a step among replicas beside its offloads, with their times.

    members: replicas that take part, by group. sizes: what they sum and shard. sent: time in which a replica sends a
    unit of memory.
    """

    members: dict[WorkGroup, int]
    sizes: ReplicaBytes
    sent: float

    @property
    def makespan(self) -> float:
        """When the last rank has joined its last sum."""
        return float(self.lanes.closed.max(initial=0.0))

    @property
    def alone(self) -> float:
        """When the step ends without works among replicas."""
        others = self.placed.works.lane != WorkLane.DP
        return float(self.beside(self.placed.only(others), self.time[others]).closed.max(initial=0.0))

    def under(self, dependencies: Dependencies, costs: Costs) -> Replication:
        """The same works, whose cells take the times of these costs."""
        return replace(self, cells=CellTimes.of(dependencies, costs.resolved(dependencies.schedule.stages)))


def replicate(
    directives: Directives, held: HeldMemory, dependencies: Dependencies, offloading: Offloading | None, replicas: int
) -> tuple[Replication, RankBytes | None]:
    """The works of ``replicas`` replicas of every rank, beside those of offloads, and the bytes of ranks.

    held: what ranks hold without works. Raises `DiagnosticError`: S410 without a time `dp` or without parameters. S406
    for a rank that holds too much. S144 for a number of replicas that the ranks of experts do not divide. S156
    where the plan's `parallel` line says something else.
    """
    plan, costs, in_bytes = held.plan, held.costs, _in_bytes(directives, held.plan)
    held = replace(held, layers=_with_experts(held.layers, plan)) if in_bytes else held
    sizes = replica_bytes(held)
    _check(directives, plan, costs, sizes, replicas)
    sent = costs.dp / (_GIGABYTE if in_bytes else 1.0)
    members = group_sizes(plan, replicas)
    per_byte = sent * (1 - 1 / replicas), sent * (1 - 1 / members[WorkGroup.SAME_EXPERTS])
    if members[WorkGroup.SAME_EXPERTS] == 1:
        sizes = replace(sizes, expert_summed=0 * sizes.expert_summed)
    before = PlacedWorks.none() if offloading is None else offloading.placed
    memory = MemoryBesideWorks(held, dependencies, before, _freed(held, sizes, replicas))
    cells = CellTimes.of(dependencies, held.of_stage) if offloading is None else offloading.cells
    own = place_replica_works(
        dependencies,
        sizes,
        duration=cells.duration,
        latency=cells.latency,
        per_byte=per_byte,
        room=_room(directives, memory),
    )
    placed = before.beside(own)
    time = lane_times(placed, dependencies, sizes, per_byte)
    if offloading is not None:
        time[placed.works.lane != WorkLane.DP] = offloading.time
    peaks = check_memory(directives.tree, held, dependencies, placed, freed=memory.freed)
    return Replication(placed, time, cells, in_bytes, members, sizes, sent), peaks


def _freed(held: HeldMemory, sizes: ReplicaBytes, replicas: int) -> Floats:
    """[stages] memory of a sharded stage that a replica does not hold between uses: the parts of the others.

    Gradients of a sharded stage are whole until they are summed, and count as whole for the step.
    """
    dense = dense_parameters(held)
    share = np.divide(sizes.sharded, sizes.sharded + sizes.last, out=np.zeros(dense.size), where=sizes.sharded > 0)
    return np.asarray(np.where(sizes.sharded > 0, dense * share * (1 - 1 / replicas) - sizes.sharded, 0.0))


def _room(directives: Directives, memory: MemoryBesideWorks) -> ShardingRoom | None:
    """The room for whole parameters; None where the plan says no memory, or shards nothing."""
    line, held, dependencies = directives.tree.memory, memory.held, memory.dependencies
    if line is None or not held.plan.shard_dense:
        return None
    beside = held.in_cells(dependencies) - memory.placed.away(dependencies)
    return ShardingRoom(beside, amount(line.limit, line.unit) - (held.standing - memory.sharded))


def weight_share(plan: Plan) -> float:
    """Share of a part's parameters, in bytes, that weights take; gradients take as many. The rest is the `states`."""
    weight = bytes_per_number(plan.dtype)
    return weight / (weight + plan.states)


def group_sizes(plan: Plan, replicas: int) -> dict[WorkGroup, int]:
    """How many replicas take part in a work of each group."""
    ranks = plan.topology.ranks if plan.topology and plan.experts else 1
    return {WorkGroup.REPLICAS: replicas, WorkGroup.SAME_EXPERTS: max(1, replicas // ranks)}


def dense_parameters(held: HeldMemory) -> Floats:
    """[stages] memory of all parameters but experts, with their `states`."""
    kinds = held.layers.parameters_in(held.layout)
    share = np.array([1 - expert_share(held.plan, kind) for kind in WORK])
    return np.asarray(kinds @ share)


def replica_bytes(held: HeldMemory) -> ReplicaBytes:
    """What replicas sum and shard, in the unit of the memory that is held.

    The table of a tied embedding is that of the embedding, on each stage that uses it. That of tied heads is the
    head's. Stages that share all ranks have one table there.
    """
    plan, layout, layers, schedule = held.plan, held.layout, held.layers, held.schedule
    weights = weight_share(plan)
    dense = dense_parameters(held) * weights
    whole = layers.per_stage(layout, "parameters") * weights
    experts = whole - dense
    last = np.zeros(dense.size)
    for tie in schedule.tied:
        if lies_apart(tie, schedule.placement):
            stages = list(tie.stages)
            of_table = layers.parameters.embedding if tie.stages[0] == 0 else layers.parameters.head
            last[stages] = of_table * weights
    own = np.array([layout.counts[stage, WORK.index(PartKind.EMBEDDING)] > 0 for stage in range(dense.size)])
    head = layout.counts[:, WORK.index(PartKind.HEAD)] * layers.parameters.head * weights
    counted = np.where(last > 0, np.where(own, last, np.minimum(head, last)), 0.0)
    free = np.maximum(dense - counted, 0.0)
    nothing = np.zeros(dense.size)
    return ReplicaBytes(nothing if plan.shard_dense else free, experts, free if plan.shard_dense else nothing, last)


def _with_experts(layers: LayerCosts, plan: Plan) -> LayerCosts:
    """The costs with the parameters of MoE layers that follow from sizes, where the plan gives none and no memory."""
    if layers.parameters.moe:
        return layers
    return replace(layers, parameters=layers.parameters._replace(**parameter_bytes(plan)))


def _in_bytes(directives: Directives, plan: Plan) -> bool:
    """Whether the parameters of a plan are in bytes; without a number of them, whether they follow from sizes."""
    tree = directives.tree
    written = [entry.unit for entry in directives.entries("parameters")]
    written += [tree.memory.unit] if tree.memory is not None else []
    return any(written) if written else bool(parameter_bytes(plan))


def _check(directives: Directives, plan: Plan, costs: Costs, sizes: ReplicaBytes, replicas: int) -> None:
    """Raises `DiagnosticError` for what leaves sums without a time or a size."""

    def refuse(code: str, message: str, help: str, word: str) -> DiagnosticError:
        return DiagnosticError([directives.fault(word, code, message, help)])

    ranks = plan.topology.ranks if plan.topology and plan.experts else 1
    if replicas % ranks:
        message = f"{replicas} replicas of a rank, and {ranks} ranks share the experts"
        raise refuse("S144", message, f"give a multiple of {ranks} replicas", "topology")
    if not any(column.any() for column in (sizes.summed, sizes.expert_summed, sizes.sharded, sizes.last)):
        message = f"nothing says how many bytes {replicas} replicas sum"
        raise refuse("S410", message, "write `parameters dense 200 MB`, or the sizes of experts", "parameters")
    if not costs.dp:
        message = f"the costs give no dp, and {replicas} replicas sum gradients"
        help = "write the time of 1 GB as `dp` into [ops] of the cost file, or say it here: `--cost dp=NUMBER`"
        raise refuse("S410", message, help, "parameters")
    for message, help in _against_devices(plan, replicas):
        raise refuse("S156", message, help, "parallel")


def _against_devices(plan: Plan, replicas: int) -> Iterator[tuple[str, str]]:
    """(message, help) of what ``replicas`` contradict in the `parallel` line."""
    if (parallel := plan.parallel) is None:
        return
    same = parallel.cp * parallel.dp
    if replicas != same:
        message = f"{replicas} replicas, and cp {parallel.cp} x dp {parallel.dp} ranks hold the same dense parameters"
        yield message, f"give {same} replicas, or write another number of ranks"
    if parallel.zero == MOST_ZERO and not plan.shard_dense:
        message = f"zero {parallel.zero}, and nothing says whether `parameters` are those before sharding"
        yield message, "write `shard dense` beside it, with the parameters of whole stages"


def refuse_unplanned(schedule: Schedule, replicas: int) -> NoReturn:
    """Raise `DiagnosticError` (S410) for replicas of a schedule without a plan."""
    message = f"nothing says how many bytes {replicas} replicas of `{schedule.name}` sum"
    help = "open a plan of the schedule, with a line `parameters`"
    raise DiagnosticError([Diagnostic("S410", message, help=help, source=schedule.source)])
