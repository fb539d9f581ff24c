"""The state of optimizers by the names of the model's parameters, and optimizers filled from such a state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from schedc_runtime.checkpoint.stored import Stored
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.trainers.held_state import StatePart

PREFIX = "optimizer."


Optimizers = Optimizer | Sequence[Optimizer] | None
"""The optimizers of a process: one, several of other parameters each, or None without parameters."""
Group = dict[str, Any]
"""A group of an optimizer's parameters with its options, as in ``param_groups``."""
Place = tuple[int, int, str]
"""Number of the optimizer, number of the group in it, and the optimizer's class."""


class OptimizerFacts(NamedTuple):
    """What optimizers keep besides tensors. options: of groups, each once. group: a parameter's place in them.

    numbers: by parameter, what of its state is a plain number. places: of each of ``options``; older states have none.
    """

    options: list[dict[str, Any]]
    group: dict[str, int]
    numbers: dict[str, dict[str, Any]]
    places: Sequence[Place] = ()

    @classmethod
    def together(cls, ranks: Iterable[OptimizerFacts]) -> OptimizerFacts:
        """Those of all ranks. Raises `RuntimeFault` for a parameter whose options differ between ranks."""
        whole = cls([], {}, {})
        known: list[tuple[Place | None, dict[str, Any]]] = []
        for rank in ranks:
            places: list[Place | None] = [(index, number, kind) for index, number, kind in rank.places]
            kinds = list(zip(places or [None] * len(rank.options), rank.options, strict=True))
            known += [kind for number, kind in enumerate(kinds) if kind not in known and kind not in kinds[:number]]
            for name, number in rank.group.items():
                if whole.group.setdefault(name, known.index(kinds[number])) != known.index(kinds[number]):
                    raise RuntimeFault(
                        f"ranks have other options for `{name}` in their optimizers: {rank.options[number]} and"
                        f" {known[whole.group[name]][1]}",
                        "make the same groups of parameters on every rank",
                    )
            whole.numbers.update(rank.numbers)
        return whole._replace(options=[own for _, own in known], places=[place for place, _ in known if place])


def optimizers_of(optimizer: Optimizers) -> list[Optimizer]:
    """[optimizers] those of this process."""
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def parameters_of(groups: Sequence[Group], once: Mapping[int, StatePart]) -> Iterator[tuple[int, StatePart]]:
    """(number in the optimizer's `state_dict`, part) of each parameter. Raises `RuntimeFault` for a foreign one."""
    for number, parameter in enumerate(p for group in groups for p in group["params"]):
        if id(parameter) not in once:
            raise RuntimeFault(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that no stage here holds",
                "give it those of pipe.parameters()",
            )
        yield number, once[id(parameter)]


def optimizer_parts(optimizer: Optimizer, once: Mapping[int, StatePart]) -> Iterator[StatePart]:
    """The tensors of an optimizer's state, each under ``optimizer.<name>.<slot>``."""
    for _, part in parameters_of(optimizer.param_groups, once):
        for slot, value in _slots(optimizer, part):
            if isinstance(value, Tensor):
                yield part.like(f"{PREFIX}{part.key}.{slot}", value)


def optimizer_facts(optimizers: Sequence[Optimizer], once: Mapping[int, StatePart]) -> OptimizerFacts:
    """What optimizers keep besides tensors.

    Raises `RuntimeFault` for what JSON cannot hold, and for a parameter that two of them have.
    """
    facts, places = OptimizerFacts([], {}, {}), list[Place]()
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            keys = [once[id(parameter)].key for parameter in group["params"] if id(parameter) in once]
            if twice := sorted(facts.group.keys() & set(keys)):
                raise RuntimeFault(f"two optimizers have `{twice[0]}`", "give each parameter to one optimizer")
            facts.group.update(dict.fromkeys(keys, len(facts.options)))
            facts.options.append({key: _plain(key, value) for key, value in group.items() if key != "params"})
            places.append((index, number, type(optimizer).__name__))
        for _, part in parameters_of(optimizer.param_groups, once):
            numbers = {slot: _plain(f"{part.key}.{slot}", value) for slot, value in _slots(optimizer, part)
                       if not isinstance(value, Tensor)}  # fmt: skip
            if numbers:
                facts.numbers[part.key] = numbers
    return facts._replace(places=places)


def empty_slots(
    groups: Sequence[Group], once: Mapping[int, StatePart], stored: Mapping[str, Stored]
) -> dict[int, dict[str, StatePart]]:
    """By number of a parameter and slot: memory for the tensors of a checkpoint. stored: each key's."""
    slots: dict[str, list[str]] = {}
    for key in stored:
        if key.startswith(PREFIX):
            name, _, slot = key.removeprefix(PREFIX).rpartition(".")
            slots.setdefault(name, []).append(slot)
    return {
        number: {
            slot: _empty(part, key, torch.Size(stored[key].shape), stored[key].dtype)
            for slot in slots.get(part.key, [])
            for key in [f"{PREFIX}{part.key}.{slot}"]
        }
        for number, part in parameters_of(groups, once)
    }


def saved_groups(optimizer: Optimizer, index: int, once: Mapping[int, StatePart], facts: OptimizerFacts) -> list[Group]:
    """The groups that the run had, with the parameters here; also those without one.

    index: number of the optimizer among those of this process. Raises `RuntimeFault` for a parameter that this
    optimizer of the run did not have.
    """
    numbers = sorted({number for own, number, _ in facts.places if own == index})
    groups: dict[int, Group] = {number: {**optimizer.defaults, "params": []} for number in numbers}
    for _, part in parameters_of(optimizer.param_groups, once):
        place = facts.places[facts.group[part.key]] if facts.places and part.key in facts.group else None
        if place is None or place[0] != index:
            raise RuntimeFault(
                f"the run has no group for `{part.key}` in this optimizer", "give the optimizer the parameters it had"
            )
        groups[place[1]]["params"].append(part.tensor)
    return list(groups.values())


def group_options(
    optimizer: Optimizer, index: int, groups: Sequence[Group], once: Mapping[int, StatePart], facts: OptimizerFacts
) -> list[dict[str, Any]]:
    """[groups] the options of a checkpoint for the groups here. Raises `RuntimeFault` for groups made otherwise.

    index: as for `saved_groups`.
    """
    kind = type(optimizer).__name__
    return [
        _options([once[id(parameter)].key for parameter in group["params"]], (index, number, kind), group, facts)
        for number, group in enumerate(groups)
    ]


def fill_optimizer(
    optimizer: Optimizer,
    once: Mapping[int, StatePart],
    groups: Sequence[Group],
    options: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, Mapping[str, Any]],
    read: Mapping[int, Mapping[str, StatePart]],
) -> None:
    """Give an optimizer the state of a checkpoint.

    groups: its own or `saved_groups`. options: `group_options`. read: as of `empty_slots`, filled.
    """
    state: dict[int, dict[str, Any]] = {}
    for number, part in parameters_of(groups, once):
        whole = {slot: each.tensor for slot, each in read[number].items()} | dict(numbers.get(part.key, {}))
        if whole:
            state[number] = whole
    optimizer.param_groups[:] = groups
    plain = optimizer.state_dict()["param_groups"]
    for own, stored in zip(plain, options, strict=True):
        own.update(stored)
    optimizer.load_state_dict({"state": state, "param_groups": plain})


def _options(names: Sequence[str], place: Place, group: Mapping[str, Any], facts: OptimizerFacts) -> dict[str, Any]:
    """The options of a checkpoint for the group at ``place`` with the parameters ``names``."""
    if lost := [name for name in names if name not in facts.group]:
        raise RuntimeFault(
            f"the checkpoint has no optimizer for `{lost[0]}`", "give the optimizer the parameters of the run"
        )
    numbers = sorted({facts.group[name] for name in names})
    for name in names if facts.places else ():
        if (was := facts.places[facts.group[name]]) != place:
            raise RuntimeFault(
                f"`{name}` is in {_said(place)} here, and was in {_said(was)} of the run, with"
                f" {_difference(group, facts.options[facts.group[name]])}",
                'make the groups that the run had, on all ranks, or take its own: Checkpoints(groups="saved")',
            )
    if len(numbers) > 1:
        raise RuntimeFault(
            f"`{names[0]}` and others of its group had other options in the checkpoint:"
            f" {[facts.options[number] for number in numbers]}",
            "make the groups of parameters that the run had",
        )
    if not names:  # the group has its parameters on other ranks
        numbers = [number for number, was in enumerate(facts.places) if was == place][:1]
    return {key: _restored(value, group.get(key)) for number in numbers for key, value in facts.options[number].items()}


def _said(place: Place) -> str:
    index, number, kind = place
    return f"group {number} of {kind}" + f" (optimizer {index})" * (index > 0)


def _difference(here: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """The options of a group that are others here."""
    other = [f"{key}={value!r} for {here.get(key)!r}" for key, value in saved.items()
             if _listed(here.get(key)) != value]  # fmt: skip
    return ", ".join(other) or "the same options"


def _slots(optimizer: Optimizer, part: StatePart) -> Iterable[tuple[str, Any]]:
    state: Mapping[Any, Any] = optimizer.state.get(part.tensor, {})
    for slot in state:
        if not isinstance(slot, str) or "." in slot:
            raise RuntimeFault(f"the optimizer keeps {slot!r} for `{part.key}`", "use slots with names without a dot")
    return state.items()


def _empty(part: StatePart, key: str, shape: torch.Size, dtype: torch.dtype) -> StatePart:
    """Memory for a stored tensor [shape] of the parameter ``part``: here all of it, or the rows of the parameter."""
    place = part.tensor.device if shape else None
    if isinstance(part.tensor, DTensor) and shape == part.tensor.shape:
        return StatePart(key, torch.zeros_like(part.tensor, dtype=dtype, requires_grad=False), shape)
    if part.split is not None and shape:
        if shape != part.shape:
            raise MaterializeError(
                f"`{key}` has the shape {list(shape)}, and `{part.key}` {list(part.shape)}", "use a folder per model"
            )
        return StatePart(key, torch.zeros_like(part.tensor, dtype=dtype, requires_grad=False), shape, split=part.split)
    if part.rows is None or not shape:
        return StatePart(key, torch.zeros(shape, dtype=dtype, device=place), shape)
    if shape[0] != part.shape[0]:
        raise MaterializeError(
            f"`{key}` has {shape[0]} rows, and `{part.key}` {part.shape[0]}", "use a folder per model"
        )
    rows = torch.zeros((len(part.tensor), *shape[1:]), dtype=dtype, device=place)
    return StatePart(key, rows, shape, part.rows)


def _plain(key: str, value: Any) -> Any:
    """``value`` as JSON holds it."""
    plain = value.item() if isinstance(value, Tensor) and not value.dim() else value
    try:
        json.dumps(plain)
    except (TypeError, ValueError):
        raise RuntimeFault(
            f"the optimizer's `{key}` is a {type(value).__name__}, which a checkpoint cannot hold",
            "use an optimizer whose options are numbers",
        ) from None
    return _listed(plain)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _fits(value: Any, like: Any) -> bool:
    """Whether JSON is of the kind of an option, or of one that is None here."""
    if isinstance(like, tuple):
        return isinstance(value, list) and len(value) == len(like) and all(map(_fits, value, like))
    if isinstance(like, (Tensor, int, float)) and not isinstance(like, bool):
        return type(value) in (int, float)
    return value is None or (type(value) in (bool, int, float, str) if like is None else type(value) is type(like))


def _restored(value: Any, like: Any) -> Any:
    """``value`` of JSON in the type of ``like``. Raises `ValueError` for a value of another kind."""
    if not _fits(value, like):
        raise ValueError(f"an option of the optimizer is {value!r}, where it has {like!r}")
    if isinstance(like, tuple):
        return tuple(value)
    return like.clone().fill_(value) if isinstance(like, Tensor) else value
