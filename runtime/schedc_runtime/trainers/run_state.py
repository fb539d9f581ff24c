"""The state of a run on one rank: boxes of the model and of its optimizer by name, and all else as JSON.

model.<name>                  a parameter or buffer, or the rows of it that lie here
optimizer.<name>.<slot>       what the optimizer keeps for a parameter
rank <r>.<n>                  tensors of further states
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from schedc_runtime.checkpoint.committed import MODEL, InBoxes, LookedPieces, stored_in_boxes, with_aliases
from schedc_runtime.checkpoint.stored import Stored, reading, whole_tensor
from schedc_runtime.data_parallel.shards_in_process import InProcessSharding
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.pipeline.agree.all_ranks import on_all_ranks
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.saved.read import SavedStep
from schedc_runtime.trainers.box_file import HeldBox
from schedc_runtime.trainers.further_states import (
    check_generators,
    packed,
    set_generators,
    states_of_generators,
    unpacked,
)
from schedc_runtime.trainers.held_state import (
    StatePart,
    check_model,
    local_boxes,
    model_parts,
    named_once,
    read_part,
    rows_here,
)
from schedc_runtime.trainers.optimizer_state import (
    OptimizerFacts,
    Optimizers,
    empty_slots,
    fill_optimizer,
    group_options,
    optimizer_facts,
    optimizer_parts,
    optimizers_of,
    saved_groups,
)
from schedc_runtime.trainers.run_facts import check_further, check_run_facts


class RunState(NamedTuple):
    """What a rank keeps: boxes, and facts as JSON."""

    boxes: list[HeldBox]
    facts: dict[str, Any]


def run_state(pipe: Pipeline, optimizer: Optimizers, further: Any) -> RunState:
    """The state of a pipeline and its optimizers here. No tensor is copied.

    further: of what else takes part, `further_states`. Raises `RuntimeFault` for a state that a checkpoint cannot hold.
    """
    assembly = pipe._assembly
    if isinstance(assembly.shards, InProcessSharding):
        raise RuntimeFault("shards of several ranks in one process are not saved", "run a process per rank")
    parts, optimizers = list(model_parts(assembly)), optimizers_of(optimizer)
    once = named_once(assembly, parts)
    first = {id(part.tensor): part.key for part in reversed(parts)}
    distinct = [part._replace(key=f"{MODEL}{part.key}") for part in parts if first[id(part.tensor)] == part.key]
    facts = optimizer_facts(optimizers, once)
    for each in optimizers:
        distinct += optimizer_parts(each, once)
    prefix, tensors = f"rank {assembly.network.process}", list[Tensor]()

    def put(tensor: Tensor) -> str:
        tensors.append(tensor)
        return f"{prefix}.{len(tensors) - 1}"

    states = packed(further, put, "the further states")
    boxes = {(box.name, box.offset): box for part in reversed(distinct) for box in _boxes(part) if box.tensor.numel()}
    own = [HeldBox(f"{prefix}.{number}", tensor, tuple(tensor.shape), (0,) * tensor.dim())
           for number, tensor in enumerate(tensors)]  # fmt: skip
    told = {"steps": pipe.steps, "seed": assembly.settings.seed, "replica": pipe.replica, "optimizer": list(facts)}
    told |= {"aliases": tied_names(assembly, parts), "hot": pipe._runner.hot.mine(), "states": states}
    return RunState([*reversed(boxes.values()), *own], told)


def tied_names(assembly: Assembly, parts: Sequence[StatePart]) -> dict[str, str]:
    """By further name of a tied weight: its first name, on all ranks or among ``parts``."""
    first = {id(part.tensor): part.key for part in reversed(parts)}
    here = {part.key: first[id(part.tensor)] for part in parts if first[id(part.tensor)] != part.key}
    return here | {name: shared.name for shared in assembly.tied for name in shared.names if name != shared.name}


def further_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """What `run_state` takes: the ``state_dict`` of each of ``states``, and the generators."""
    return {"states": {name: each.state_dict() for name, each in states.items()}, "generators": states_of_generators()}


class KeptTensors(NamedTuple):
    """A state that ranks have kept. tensors: by name. facts: [ranks of the run] as of `run_state`.

    looked: what compares bytes with their checksums before they are used; None in memory.
    """

    tensors: Mapping[str, Stored]
    facts: list[dict[str, Any]]
    looked: LookedPieces | None = None

    @classmethod
    def on_disk(cls, step: SavedStep) -> KeptTensors:
        """The tensors of a committed step. Raises `MaterializeError` where records or headers do not fit each other."""
        facts = [dict(manifest.facts) for manifest in step.manifests]
        return cls(stored_in_boxes(step.tensors), facts, LookedPieces(step))

    def whole(self, name: str) -> Tensor:
        """[...] a tensor of further states."""
        stored = self.tensors[name]
        if self.looked is not None and isinstance(stored, InBoxes):
            self.looked.look(stored.spans(0, stored.shape[0] if stored.shape else 1))
        return whole_tensor(stored)


def load_run_state(
    pipe: Pipeline, optimizer: Optimizers, states: Mapping[str, Any], kept: KeptTensors, groups: str | None = None
) -> None:
    """Give the pipeline, its optimizers and ``states`` what a run has kept. A collective of all ranks, between steps.

    groups: ``"saved"`` for optimizers that take the groups of the run.

    Raises the same error on every rank, before anything has changed, for the state of another model or other seeds. So
    it does for facts that `run_state` would not write, and for bytes that have changed: `FlawedStep`. What only a
    ``load_state_dict`` refuses is raised later. With other ranks or stages hot experts are those of the same layer and
    group. The first step lends none where the run had no such group.
    """
    assembly, optimizers = pipe._assembly, optimizers_of(optimizer)

    def planned() -> _Load:
        check_model("the run", "use a folder per model", assembly, kept.tensors, ())
        check_run_facts(kept.facts, assembly.names)
        load = _planned(pipe, optimizers, states, kept, groups)
        load.look(kept.looked)
        return load

    load, lent = on_all_ranks(assembly.guard, "loading a state", planned, lambda load: load.hot)
    with assembly.guard("loading a state"):
        for part in load.all_parts():
            read_part(part, load.stored[part.key])
        for each, own in zip(optimizers, load.optimizers, strict=True):
            fill_optimizer(each, load.once, own.groups, own.options, load.numbers, own.slots)
        for name, state in states.items():
            with reading("the run's state", name):
                state.load_state_dict(load.further["states"][name])
        assembly.weights.loaded()
    pipe.steps = kept.facts[0]["steps"]
    if any(lent) and None not in lent:
        pipe.load_balance_state({key: held for own in lent for key, held in own.items()})
    if load.generators:
        set_generators(load.further["generators"])


class _OptimizerLoad(NamedTuple):
    """What an optimizer will be given. slots: memory for its tensors, by number of the parameter and slot."""

    groups: list[dict[str, Any]]
    options: list[dict[str, Any]]
    slots: dict[int, dict[str, StatePart]]


class _Load(NamedTuple):
    """What a rank will read.

    generators: whether the states of generators come from this rank. own: names of tensors of further states. hot: the
    experts that are hot next, or None where the run has said nothing of some layer here.
    """

    stored: Mapping[str, Stored]
    parts: list[StatePart]
    once: dict[int, StatePart]
    optimizers: list[_OptimizerLoad]
    numbers: dict[str, dict[str, Any]]
    further: dict[str, Any]
    generators: bool
    hot: dict[str, list[list[int]]] | None

    def all_parts(self) -> Iterator[StatePart]:
        """The parts of the model and of the optimizers."""
        yield from self.parts
        yield from (part for each in self.optimizers for own in each.slots.values() for part in own.values())

    def look(self, looked: LookedPieces | None) -> None:
        """Compare the bytes of all parts with their checksums."""
        if looked is not None:
            boxes = ((self.stored[part.key], rows) for part in self.all_parts() for rows in rows_here(part))
            looked.look(span for stored, rows in boxes if isinstance(stored, InBoxes) for span in stored.spans(*rows))


def _planned(
    pipe: Pipeline, optimizers: Sequence[Optimizer], states: Mapping[str, Any], kept: KeptTensors, groups: str | None
) -> _Load:
    assembly, everyone = pipe._assembly, kept.facts
    stored = with_aliases(kept.tensors, (facts["aliases"] for facts in everyone))
    if (seed := everyone[0]["seed"]) != assembly.settings.seed:
        raise MaterializeError(
            f"the run has the seed {seed}, and this pipeline {assembly.settings.seed}", "give Pipeline(seed=...) that"
        )
    listed = list(model_parts(assembly))
    parts = [part._replace(key=f"{MODEL}{part.key}") for part in listed]
    check_model("the run", "use a folder per model", assembly, stored, parts)
    _check_tied(listed, {name: first for facts in everyone for name, first in facts["aliases"].items()})
    once = named_once(assembly, listed)
    held = OptimizerFacts.together(OptimizerFacts(*facts["optimizer"]) for facts in everyone)
    own_optimizers = []
    for index, optimizer in enumerate(optimizers):
        own_groups = saved_groups(optimizer, index, once, held) if groups == "saved" else optimizer.param_groups
        with reading("the run's optimizer"):
            options = group_options(optimizer, index, own_groups, once, held)
        own_optimizers.append(_OptimizerLoad(list(own_groups), options, empty_slots(own_groups, once, stored)))
    process, own = assembly.network.process, _own_facts(assembly, everyone)
    with reading("the run's states of loaders, schedules and generators"):
        further = unpacked(own["states"], kept.whole)
        check_further(further)
        if further["generators"]:
            check_generators(further["generators"])
    if missing := sorted(states.keys() - further["states"].keys()):
        raise MaterializeError(
            f"the run has kept no state of `{missing[0]}`", "pass the states that the run was started with"
        )
    hot = pipe._runner.hot.of_layers({key: value for facts in everyone for key, value in facts["hot"].items()})
    generators = bool(further["generators"]) and own is everyone[process % len(everyone)]
    return _Load(stored, parts, once, own_optimizers, held.numbers, further, generators, hot)


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


def _boxes(part: StatePart) -> Iterator[HeldBox]:
    return (HeldBox(part.key, tensor, tuple(part.shape), offset) for tensor, offset in local_boxes(part))


def slot_bytes(optimizer: Optimizers) -> int:
    """Bytes that optimizers will keep once they have made a step, as far as a trial with one number tells."""
    return sum(_slot_bytes(each) for each in optimizers_of(optimizer) if not each.state)


def _slot_bytes(optimizer: Optimizer) -> int:
    try:
        probe: Any = torch.nn.Parameter(torch.zeros(2))
        trial = type(optimizer)([probe], **optimizer.defaults)
        probe.grad = torch.zeros(2)
        trial.step()
        copies = sum(isinstance(value, Tensor) and value.shape == probe.shape for value in trial.state[probe].values())
    except Exception:  # an optimizer of the user's own, with other arguments: most keep two
        copies = 2
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    local = (parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters)
    return sum(copies * parameter.nbytes + 64 for parameter in local)
