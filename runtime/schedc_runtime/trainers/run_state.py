"""The state of a run on one rank: boxes of the model and of its optimizer by name, and all else as JSON.

model.<name>                  a parameter or buffer, or the rows of it that lie here
optimizer.<name>.<slot>       what the optimizer keeps for a parameter
rank <r>.<n>                  tensors of further states
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from schedc_runtime.checkpoint.committed import MODEL, with_aliases
from schedc_runtime.checkpoint.stored import Stored, reading
from schedc_runtime.data_parallel.shards_in_process import InProcessSharding
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.trainers.further_states import (
    check_generators,
    packed,
    set_generators,
    states_of_generators,
    unpacked,
)
from schedc_runtime.trainers.held_state import StatePart, check_model, model_parts, named_once, read_part
from schedc_runtime.trainers.image_writer import HeldBox
from schedc_runtime.trainers.optimizer_state import (
    OptimizerFacts,
    empty_slots,
    fill_optimizer,
    group_options,
    optimizer_facts,
    optimizer_parts,
)
from schedc_runtime.trainers.run_facts import check_further, check_run_facts


class RunState(NamedTuple):
    """What a rank keeps: boxes, and facts as JSON."""

    boxes: list[HeldBox]
    facts: dict[str, Any]


def run_state(pipe: Pipeline, optimizer: Optimizer | None, further: Any) -> RunState:
    """The state of a pipeline and its optimizer here. No tensor is copied.

    further: of what else takes part, `further_states`. Raises `RuntimeFault` for a state that a checkpoint cannot hold.
    """
    assembly = pipe._assembly
    if isinstance(assembly.shards, InProcessSharding):
        raise RuntimeFault("shards of several ranks in one process are not saved", "run a process per rank")
    parts = list(model_parts(assembly))
    once, facts = named_once(assembly, parts), OptimizerFacts([], {}, {})
    named: dict[int, str] = {}
    aliases = {name: shared.name for shared in assembly.tied for name in shared.names if name != shared.name}
    distinct = []
    for part in parts:
        if (first := named.setdefault(id(part.tensor), part.key)) == part.key:
            distinct.append(part._replace(key=f"{MODEL}{part.key}"))
        else:
            aliases.setdefault(part.key, first)
    if optimizer is not None:
        facts = optimizer_facts(optimizer, once)
        distinct += optimizer_parts(optimizer, once)
    prefix, tensors = f"rank {assembly.network.process}", list[Tensor]()

    def put(tensor: Tensor) -> str:
        tensors.append(tensor)
        return f"{prefix}.{len(tensors) - 1}"

    states = packed(further, put, "the further states")
    boxes = {(box.name, box.offset): box for box in reversed([*map(_box, distinct)]) if box.tensor.numel()}
    own = [HeldBox(f"{prefix}.{number}", tensor, tuple(tensor.shape), (0,) * tensor.dim())
           for number, tensor in enumerate(tensors)]  # fmt: skip
    told = {"steps": pipe.steps, "seed": assembly.settings.seed, "replica": pipe.replica, "optimizer": list(facts)}
    told |= {"aliases": aliases, "hot": pipe._runner.hot.mine(), "states": states}
    return RunState([*reversed(boxes.values()), *own], told)


def further_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """What `run_state` takes: the ``state_dict`` of each of ``states``, and the generators."""
    return {"states": {name: each.state_dict() for name, each in states.items()}, "generators": states_of_generators()}


def load_run_state(
    pipe: Pipeline,
    optimizer: Optimizer | None,
    states: Mapping[str, Any],
    stored: Mapping[str, Stored],
    everyone: list[dict[str, Any]],
) -> None:
    """Give the pipeline, its optimizer and ``states`` what a run has kept. A collective of all ranks, between steps.

    stored: tensors by name. everyone: [ranks that have kept it] the facts of `run_state`.
    Raises the same error on every rank, before anything has changed, for the state of another model or other seeds. So
    it does for facts that `run_state` would not write. What only a ``load_state_dict`` refuses is raised later.
    """
    assembly = pipe._assembly
    load: _Load | str = ""
    try:
        check_run_facts(everyone, assembly.names)
        load = _planned(
            assembly, optimizer, states, with_aliases(stored, (facts["aliases"] for facts in everyone)), everyone
        )
    except RuntimeFault as fault:
        load = f"{fault.message}\n{fault.help}"
    control = assembly.guard.control
    with assembly.guard("loading a state"):
        answers = control.gather("loading a state", load if isinstance(load, str) else None)
    for answer in answers:
        if answer is not None:
            raise MaterializeError(*answer.rsplit("\n", 1))
    assert not isinstance(load, str)
    with assembly.guard("loading a state"):
        slots = [part for own in load.slots.values() for part in own.values()]
        for part in [*load.parts, *slots]:
            read_part(part, load.stored[part.key])
        if optimizer is not None:
            fill_optimizer(optimizer, load.once, load.options, load.numbers, load.slots)
        for name, each in states.items():
            with reading("the run's state", name):
                each.load_state_dict(load.further["states"][name])
        assembly.weights.loaded()
    pipe.steps = everyone[0]["steps"]
    if hot := {key: value for facts in everyone for key, value in facts["hot"].items()}:
        pipe.load_hot_state(hot)
    if load.generators:
        set_generators(load.further["generators"])


class _Load(NamedTuple):
    """What a rank will read. slots: memory for the optimizer's tensors, by number of the parameter and slot.

    generators: whether the states of generators come from this rank.
    """

    stored: Mapping[str, Stored]
    parts: list[StatePart]
    once: dict[int, StatePart]
    slots: dict[int, dict[str, StatePart]]
    options: list[dict[str, Any]]
    numbers: dict[str, dict[str, Any]]
    further: dict[str, Any]
    generators: bool


def _planned(
    assembly: Assembly,
    optimizer: Optimizer | None,
    states: Mapping[str, Any],
    stored: Mapping[str, Stored],
    everyone: list[dict[str, Any]],
) -> _Load:
    if (seed := everyone[0]["seed"]) != assembly.settings.seed:
        raise MaterializeError(
            f"the run has the seed {seed}, and this pipeline {assembly.settings.seed}", "give Pipeline(seed=...) that"
        )
    listed = list(model_parts(assembly))
    parts = [part._replace(key=f"{MODEL}{part.key}") for part in listed]
    check_model("the run", "use a folder per model", assembly, stored, parts)
    _check_tied(listed, {name: first for facts in everyone for name, first in facts["aliases"].items()})
    once = named_once(assembly, listed)
    slots: dict[int, dict[str, StatePart]] = {}
    options: list[dict[str, Any]] = []
    held = OptimizerFacts.together(OptimizerFacts(*facts["optimizer"]) for facts in everyone)
    if optimizer is not None:
        slots = empty_slots(optimizer, once, stored)
        with reading("the run's optimizer"):
            options = group_options(optimizer, once, held)
    process, own = assembly.network.process, _own_facts(assembly, everyone)
    with reading("the run's states of loaders, schedules and generators"):
        further = unpacked(own["states"], lambda name: _whole(stored[name]))
        check_further(further)
        check_generators(further["generators"])
    if missing := sorted(states.keys() - further["states"].keys()):
        raise MaterializeError(
            f"the run has kept no state of `{missing[0]}`", "pass the states that the run was started with"
        )
    return _Load(stored, parts, once, slots, options, held.numbers, further, own is everyone[process % len(everyone)])


def _own_facts(assembly: Assembly, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Chooses the further states of this rank. With another number of ranks they are those of a rank of its replica."""
    process, replica = assembly.network.process, assembly.places[0].replica
    if len(everyone) == len(assembly.guard.control.names):
        return everyone[process]
    of_replica = [facts for facts in everyone if facts["replica"] == replica]
    return of_replica[0] if of_replica else everyone[0]


def _check_tied(parts: Iterable[StatePart], first: Mapping[str, str]) -> None:
    """Raise `MaterializeError` where two weights of the run are one here.

    first: by name in the run, the first of all names of this weight.
    """
    keys: dict[int, str] = {}
    for part in parts:
        other = keys.setdefault(id(part.tensor), part.key)
        if first.get(other, other) != first.get(part.key, part.key):
            raise MaterializeError(
                f"`{other}` and `{part.key}` are one tied weight, and the run has kept two", "use a folder per model"
            )


def _whole(stored: Stored) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read(tensor)
    return tensor


def _box(part: StatePart) -> HeldBox:
    tensor, offset = part.tensor.detach(), [0] * len(part.shape)
    if isinstance(tensor, DTensor):
        _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        tensor, offset = tensor.to_local(), list(begin)
    elif part.first is not None:
        offset[0] = part.first
    return HeldBox(part.key, tensor, tuple(part.shape), tuple(offset))


def slot_bytes(optimizer: Optimizer | None, boxes: Iterable[HeldBox]) -> int:
    """Bytes that an optimizer will keep once it has made a step, as far as a trial with one number tells."""
    if optimizer is None or any(box.name.startswith("optimizer.") for box in boxes):
        return 0
    try:
        probe: Any = torch.nn.Parameter(torch.zeros(2))
        trial = type(optimizer)([probe], **optimizer.defaults)
        probe.grad = torch.zeros(2)
        trial.step()
        copies = sum(isinstance(value, Tensor) and value.shape == probe.shape for value in trial.state[probe].values())
    except Exception:  # an optimizer of the user's own, with other arguments: most keep two
        copies = 2
    parameters = _parameters(optimizer)
    return sum(copies * parameter.nbytes + 64 for parameter in parameters)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.to_local() if isinstance(parameter, DTensor) else parameter
