"""The devices of a step and its batch: ``topology``, ``parallel`` and ``batch``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from schedc.diagnostics import Diagnostic
from schedc.ir.contradictions import MOST_ZERO
from schedc.ir.parallel import OF_ATTENTION, GlobalBatch, Parallel
from schedc.ir.plan import Plan, Topology
from schedc.ir.schedule import Schedule
from schedc.ir.verify_plan import MOST_RANKS
from schedc.plan.counts.split_ranks import exchanged_bytes
from schedc.plan.directives.base import Directive, Directives
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import BatchLine, GivenValue, ParallelLine, TopologyLine, WordPair
from schedc.units import exact_unit, shown, speed_of

# ``topology nodes 4 x 8 rail 50 GB/s node 400 GB/s``: the ranks of an expert group, and links.


def _read_topology(reading: Directives, line: TopologyLine) -> None:
    shape = zip(line.words, ("nodes", "x"), strict=True)
    good = [reading.word(word, (name,), "part of a topology") for word, name in shape]
    speeds: dict[str, float] = {}
    for link in line.links:
        if not reading.word(link, ("rail", "node"), "link"):
            continue
        if link.name in speeds:
            reading.report("S144", f"`{link.name}` is said twice", link.span, "keep one of the two")
        speed = speed_of(link.value, link.unit)
        if speed is None or speed <= 0:
            help = f"write it as `{link.name} 50 GB/s`; Gbit/s and GiB/s are known too"
            reading.report("S146", f"`{link.name}` without a speed", link.span, help)
        speeds[link.name] = speed or 0.0
    if line.nodes < 1 or line.per_node < 1 or line.nodes * line.per_node > MOST_RANKS:
        message = f"{line.nodes} nodes of {line.per_node} ranks"
        reading.report("S146", message, line.span, f"from 1 to {MOST_RANKS:,} ranks")
    elif all(good):
        reading.give(topology=Topology(line.nodes, line.per_node, **speeds))


def _write_topology(plan: Plan) -> Iterator[str]:
    if (topology := plan.topology) is not None:
        links = "".join(
            f" {name} {exact_unit(value)}/s" for name in ("rail", "node") if (value := getattr(topology, name))
        )
        yield f"topology nodes {topology.nodes} x {topology.per_node}{links}"


# ``parallel tp 8 of attention cp 1 ep 32 dp 48 zero 1``: how a step is spread over devices beside its pipeline.


_NAMES_OF_PARALLEL = ("tp", "cp", "ep", "dp", "zero", "devices", "node")
_DEFAULTS_OF_PARALLEL = {field.name: field.default for field in fields(Parallel)}


def _read_parallel(reading: Directives, line: ParallelLine) -> None:
    values: dict[str, Any] = {}
    before = ""
    for part in line.parts:
        if isinstance(part, WordPair):
            if not _read_of(reading, part, before):
                return
            values["of"] = OF_ATTENTION
        elif not _read_number(reading, part, values):
            return
        before = part.name if isinstance(part, GivenValue) else ""
    reading.give(parallel=Parallel(**values))


def _read_of(reading: Directives, pair: WordPair, before: str) -> bool:
    """``of attention``, which stands behind the tensor parallel ranks."""
    if not reading.word(pair.first, ("of",), "part of a parallel line"):
        return False
    if before != "tp":
        reading.report("S156", "`of attention` does not follow `tp`", pair.span, "write `tp 8 of attention`")
        return False
    return reading.word(pair.second, (OF_ATTENTION,), "part of a model")


def _read_number(reading: Directives, part: GivenValue, values: dict[str, Any]) -> bool:
    if not reading.word(part, _NAMES_OF_PARALLEL, "part of a parallel line"):
        return False
    if part.name in values:
        reading.report("S144", f"`{part.name}` is said twice", part.span, "keep one of the two")
        return False
    if part.name == "zero" and part.value > MOST_ZERO:
        help = "0 shards nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too"
        reading.report("S156", f"no stage {part.value} of ZeRO", part.span, help)
        return False
    if part.name != "zero" and part.value < 1:
        reading.report("S156", f"`{part.name} {part.value}`", part.span, "numbers of ranks begin at 1")
        return False
    values[part.name] = int(part.value)
    return True


def _write_parallel(plan: Plan) -> Iterator[str]:
    if (parallel := plan.parallel) is not None:
        said = [f"tp {parallel.tp}" + f" of {parallel.of}" * bool(parallel.of)]
        for name in _NAMES_OF_PARALLEL[1:]:
            value = getattr(parallel, name)
            said += [f"{name} {value}"] * (value != _DEFAULTS_OF_PARALLEL[name])
        yield f"parallel {' '.join(said)}"


def _check_parallel(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S156: the devices are not those of a pipeline rank times the ranks of the schedule."""
    parallel = directives.plan.parallel
    if parallel is None or parallel.devices in (0, parallel.per_rank * schedule.ranks):
        return
    product = f"tp {parallel.tp} x cp {parallel.cp} x dp {parallel.dp} x {schedule.ranks} ranks"
    message = f"{parallel.devices:,} devices, and {product} = {parallel.per_rank * schedule.ranks:,}"
    help = "change `dp`, or the ranks of the schedule"
    if parallel.devices % (rest := parallel.tp * parallel.cp * schedule.ranks) == 0:
        help = f"with {schedule.ranks} ranks write `dp {parallel.devices // rest}`"
    yield directives.fault("parallel", "S156", message, help)


def _facts_parallel(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """per_rank: devices of one pipeline rank. expert_replicas: how often these hold each expert.

    exchanged: `exchanged_bytes`, where there are such.
    """
    if (parallel := plan.parallel) is None:
        return {}
    values = {name: getattr(parallel, name) for name in ("tp", "of", "cp", "ep", "dp", "zero")}
    replicas = parallel.per_rank // parallel.expert_group
    facts = {**values, "per_rank": parallel.per_rank, "expert_replicas": replicas}
    exchanged = exchanged_bytes(plan)
    return {"parallel": facts | ({"exchanged": exchanged} if exchanged else {})}


def _text_parallel(facts: dict[str, Any]) -> Iterator[str]:
    if (said := facts.get("parallel")) is not None:
        of = f" of {said['of']}" * bool(said["of"])
        axes = f"parallel tp {said['tp']}{of} cp {said['cp']} ep {said['ep']} dp {said['dp']} zero {said['zero']}"
        held = f", each expert on {said['expert_replicas']:,} groups of them" * (said["ep"] > 1)
        yield f"{axes}: {said['per_rank']:,} devices for each rank of the pipeline{held}"
        if exchanged := said.get("exchanged"):
            sizes = ", ".join(f"{role} {shown(size)}" for role, size in exchanged.items())
            yield f"each exchange of a microbatch on a rank: {sizes}"


# ``batch 4608 x 8192 by 1``: the sequences of a step, their tokens, and the sequences of a microbatch.


def _read_batch(reading: Directives, line: BatchLine) -> None:
    good = reading.word(line.times, ("x",), "part of a batch")
    if line.by is not None:
        good &= reading.word(line.by, ("by",), "part of a batch")
    if good:
        reading.give(batch=GlobalBatch(line.sequences, line.tokens, int(line.by.value) if line.by else 1))


def _write_batch(plan: Plan) -> Iterator[str]:
    if (batch := plan.batch) is not None:
        yield f"batch {batch.sequences} x {batch.tokens} by {batch.by}"


def _check_batch(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S157: sequences or tokens that are not those of the schedule's microbatches."""
    plan = directives.plan
    if (batch := plan.batch) is None:
        return
    parts = schedule.sizes.get(directives.segments, 1)
    microbatches = schedule.microbatches // parts
    fault = _sequence_fault(batch, plan.parallel, microbatches) or _token_fault(batch, plan, parts)
    if fault is not None:
        yield directives.fault("batch", "S157", *fault)


def _sequence_fault(batch: GlobalBatch, parallel: Parallel | None, microbatches: int) -> tuple[str, str] | None:
    """(message, help) where the sequences are not microbatches x dp x by; without dp, where no dp would do."""
    shape = f"{microbatches} microbatches x {batch.by}"
    if parallel is None:
        if batch.sequences % (microbatches * batch.by) == 0:
            return None
        help = f"give a multiple of {microbatches * batch.by:,} sequences, or change the schedule's microbatches"
        return f"{batch.sequences:,} sequences in {shape} on each replica", help
    step = parallel.dp * batch.by
    if batch.sequences == microbatches * step:
        return None
    help = f"write {microbatches * step:,} sequences"
    if batch.sequences % step == 0:
        help = f"give the schedule {batch.sequences // step:,} microbatches, or {help}"
    return f"{batch.sequences:,} sequences, and {shape} x dp {parallel.dp} = {microbatches * step:,}", help


def _token_fault(batch: GlobalBatch, plan: Plan, parts: int) -> tuple[str, str] | None:
    """(message, help) where ``tokens`` is not a microbatch's share of a rank. parts: segments of a microbatch."""
    split = plan.parallel or Parallel()
    tokens, rest = divmod(batch.by * batch.tokens, split.tp * split.cp * parts)
    if not plan.tokens or (plan.tokens == tokens and not rest):
        return None
    shares = [
        f"{name} {count}" for name, count in (("tp", split.tp), ("cp", split.cp), ("segments", parts)) if count > 1
    ]
    over = f" over {' x '.join(shares)}" * bool(shares)
    message = f"`tokens {plan.tokens}`, and a microbatch of {batch.by} x {batch.tokens} tokens{over}"
    return message, f"a rank has its share of a microbatch's tokens: write `tokens {tokens}`"


def _facts_batch(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """step_tokens: tokens of a step."""
    if (batch := plan.batch) is None:
        return {}
    values = {"sequences": batch.sequences, "tokens": batch.tokens, "by": batch.by}
    return {"batch": {**values, "step_tokens": batch.sequences * batch.tokens}}


def _text_batch(facts: dict[str, Any]) -> Iterator[str]:
    if (said := facts.get("batch")) is not None:
        step = f"{said['step_tokens']:,} tokens of a step"
        yield f"batch {said['sequences']} x {said['tokens']} by {said['by']}: {step}"


ROWS = (
    Directive("topology", _read_topology, _write_topology),
    Directive(
        "parallel",
        _read_parallel,
        _write_parallel,
        check_schedule=_check_parallel,
        facts=_facts_parallel,
        text=_text_parallel,
    ),
    Directive("batch", _read_batch, _write_batch, check_schedule=_check_batch, facts=_facts_batch, text=_text_batch),
)
