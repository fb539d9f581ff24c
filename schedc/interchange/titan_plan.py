"""torchtitan's flags for what a plan attaches to a schedule; what its pipelines do otherwise is refused.

Names and rules are those of torchtitan 0.3.0: torchtitan/config/configs.py, distributed/parallel_dims.py and
models/common/moe_sharding.py there, and of FSDP2 in pipelines of torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedc.diagnostics import DiagnosticError
from schedc.interchange.megatron_plan import FOREIGN
from schedc.interchange.refusals import cannot
from schedc.ir.parallel import Parallel
from schedc.ir.plan import Level, Method, Plan
from schedc.ir.schedule import Schedule

_ZERO = {
    2: "it sums gradients once, behind the last backward",
    3: "it holds gathered parameters from a backward to the last one",
}
"""What torchtitan's pipelines do in place of a level of sharding."""
_PARAMETERS = {"bf16": "bfloat16", "fp32": "float32"}
_BACKENDS = {Method.FLAT: "standard", Method.HIERARCHICAL: "deepep"}
"""What torchtitan calls ways of rows to their experts; `auto` leaves it open."""


def titan_flags(schedule: Schedule) -> Iterator[str]:
    """Comments and flags of the plan of a schedule: devices, types, recomputation. Nothing without a plan.

    Raises `DiagnosticError`: S607 for devices, types, levels, exchanges and overlapped pairs that torchtitan does not
    have, S614 for a line of the plan without a flag.
    """
    plan = schedule.plan
    for line in FOREIGN:
        if line.is_in(plan):
            message = f"torchtitan has no flag for the `{line.word}` line of the plan"
            raise cannot("S614", message, "its models decide that", "leave it out of the plan", schedule.source)
    parallel = plan.parallel or Parallel()
    if plan.overlap and parallel.ep > 1:
        why = "it runs the ops of a pair one after the other"
        raise _refusal(schedule, "does not overlap exchanges of experts", why, "write `overlap off`")
    if schedule.layout:
        yield f"# The plan lays its layers out as {schedule.layout}: where torchtitan splits them otherwise,"
        yield "# set `parallelism.module_fqns_per_model_part`."
    yield from _recompute(schedule, plan)
    if plan.experts is not None:
        yield from _exchange(schedule, plan, parallel)
    if plan.dtype:
        if plan.dtype not in _PARAMETERS:
            raise _refusal(schedule, f"has no parameters in {plan.dtype}", "", "`tokens ... dtype bf16`")
        yield f"--training.mixed_precision_param {_PARAMETERS[plan.dtype]}"
    if plan.parallel is not None:
        yield from _devices(schedule, plan, parallel)


def batch_flags(schedule: Schedule) -> Iterator[str]:
    """The batch of a replica in a step, and of a microbatch; tokens and the whole batch where the plan says them."""
    batch = schedule.plan.batch
    by = batch.by if batch is not None else 1
    yield f"--training.local_batch_size {schedule.microbatches * by}"
    if batch is not None:
        yield f"--training.global_batch_size {batch.sequences}"
        yield f"--training.seq_len {batch.tokens}"
    yield f"--parallelism.pipeline_parallel_microbatch_size {by}"


def _recompute(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """A comment: a flag cannot choose the kind of checkpointing, which is a class of the configuration."""
    levels = {(each.level, each.adaptive, each.layers) for each in plan.recompute} or {(Level.NONE, None, ())}
    if levels == {(Level.NONE, None, ())}:
        kind = "None: nothing is recomputed"
    elif levels == {(Level.LAYER, None, ())}:
        kind = "FullAC.Config(): each layer is recomputed"
    else:
        what = "has no such levels of recomputation"
        raise _refusal(schedule, what, "it recomputes whole layers of all stages", "`recompute layer` is the nearest")
    if plan.parallel is not None or plan.recompute:
        yield f"# Set `activation_checkpoint` of the configuration to {kind}."


def _exchange(schedule: Schedule, plan: Plan, parallel: Parallel) -> Iterator[str]:
    """A comment: the way of rows is an argument of the functions that make configurations."""
    if plan.capacity is not None:
        message = "torchtitan has no flag for the `capacity` line of the plan"
        raise cannot("S614", message, "it drops no rows of training", "leave it out of the plan", schedule.source)
    if plan.method is Method.ALLGATHER:
        why = "rows travel to the ranks of their experts alone"
        raise _refusal(schedule, "does not gather rows on all expert ranks", why, "write `alltoall flat`")
    if parallel.ep > 1 and plan.method in _BACKENDS:
        yield f'# Set `moe_comm_backend` to "{_BACKENDS[plan.method]}" where the configuration of the model is made.'


def _devices(schedule: Schedule, plan: Plan, parallel: Parallel) -> Iterator[str]:
    if (why := _ZERO.get(parallel.zero)) is not None:
        raise _refusal(schedule, f"has no zero {parallel.zero} in a pipeline", why, "`zero 1` is the nearest")
    if plan.experts is not None:
        _check_experts(schedule, parallel)
    shards = parallel.dp if parallel.zero else 1
    yield f"--parallelism.tensor_parallel_degree {parallel.tp}"
    yield f"--parallelism.context_parallel_degree {parallel.cp}"
    yield f"--parallelism.expert_parallel_degree {parallel.ep}"
    yield f"--parallelism.data_parallel_replicate_degree {parallel.dp // shards}"
    yield f"--parallelism.data_parallel_shard_degree {shards}"
    yield "--parallelism.fsdp_reshard_after_forward never"


def _check_experts(schedule: Schedule, parallel: Parallel) -> None:
    """Expert ranks share the devices that shard parameters, and then no tensor rank splits an expert."""
    if parallel.tp > 1 and bool(parallel.of) != (parallel.ep > 1):
        what = "splits experts by tensor ranks where ep is 1, and nowhere else"
        raise _refusal(schedule, what, "", "write `tp N of attention` with ep above 1, `tp N` with ep 1")
    inside = parallel.tp * parallel.cp
    if not parallel.zero and inside % parallel.ep:
        why = f"expert ranks lie inside of ranks that shard parameters, and without zero of tp * cp = {inside}"
        raise _refusal(schedule, f"has no ep {parallel.ep} with zero 0 here", why, "`zero 1` is the nearest")


def _refusal(schedule: Schedule, what: str, why: str, nearest: str) -> DiagnosticError:
    return cannot("S607", f"torchtitan {what}", why, nearest, schedule.source)
