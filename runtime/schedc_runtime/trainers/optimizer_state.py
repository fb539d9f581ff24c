"""The state of an optimizer by the names of the model's parameters, and an optimizer filled from such a state."""

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


class OptimizerFacts(NamedTuple):
    """What an optimizer keeps besides tensors. options: of groups, each once. group: a parameter's place in them.

    numbers: by parameter, what of its state is a plain number.
    """

    options: list[dict[str, Any]]
    group: dict[str, int]
    numbers: dict[str, dict[str, Any]]

    @classmethod
    def together(cls, ranks: Iterable[OptimizerFacts]) -> OptimizerFacts:
        """Those of all ranks. Raises `RuntimeFault` for a parameter whose options differ between ranks."""
        whole = cls([], {}, {})
        for rank in ranks:
            for name, number in rank.group.items():
                options = rank.options[number]
                if options not in whole.options:
                    whole.options.append(options)
                if whole.group.setdefault(name, whole.options.index(options)) != whole.options.index(options):
                    raise RuntimeFault(
                        f"ranks have other options for `{name}` in their optimizers: {options} and"
                        f" {whole.options[whole.group[name]]}",
                        "make the same groups of parameters on every rank",
                    )
            whole.numbers.update(rank.numbers)
        return whole


def parameters_of(optimizer: Optimizer, once: Mapping[int, StatePart]) -> Iterator[tuple[int, StatePart]]:
    """(number in the optimizer's `state_dict`, part) of each parameter. Raises `RuntimeFault` for a foreign one."""
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in once:
            raise RuntimeFault(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that no stage here holds",
                "give it those of pipe.parameters()",
            )
        yield number, once[id(parameter)]


def optimizer_parts(optimizer: Optimizer, once: Mapping[int, StatePart]) -> Iterator[StatePart]:
    """The tensors of an optimizer's state, each under ``optimizer.<name>.<slot>``."""
    for _, part in parameters_of(optimizer, once):
        for slot, value in _slots(optimizer, part):
            if isinstance(value, Tensor):
                yield part.like(f"{PREFIX}{part.key}.{slot}", value)


def optimizer_facts(optimizer: Optimizer, once: Mapping[int, StatePart]) -> OptimizerFacts:
    """What an optimizer keeps besides tensors. Raises `RuntimeFault` for what JSON cannot hold."""
    facts = OptimizerFacts([], {}, {})
    for number, group in enumerate(optimizer.param_groups):
        own = {key: _plain(key, value) for key, value in group.items() if key != "params"}
        facts.options.append(own)
        facts.group.update({once[id(parameter)].key: number for parameter in group["params"] if id(parameter) in once})
    for _, part in parameters_of(optimizer, once):
        numbers = {slot: _plain(f"{part.key}.{slot}", value) for slot, value in _slots(optimizer, part)
                   if not isinstance(value, Tensor)}  # fmt: skip
        if numbers:
            facts.numbers[part.key] = numbers
    return facts


def empty_slots(
    optimizer: Optimizer, once: Mapping[int, StatePart], stored: Mapping[str, Stored]
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
        for number, part in parameters_of(optimizer, once)
    }


def group_options(optimizer: Optimizer, once: Mapping[int, StatePart], facts: OptimizerFacts) -> list[dict[str, Any]]:
    """[groups] the options of a checkpoint for the groups here. Raises `RuntimeFault` for groups made otherwise."""
    return [
        _options([once[id(parameter)].key for parameter in group["params"]], group, facts)
        for group in optimizer.param_groups
    ]


def fill_optimizer(
    optimizer: Optimizer,
    once: Mapping[int, StatePart],
    options: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, Mapping[str, Any]],
    read: Mapping[int, Mapping[str, StatePart]],
) -> None:
    """Give an optimizer the state of a checkpoint. options: `group_options`. read: as of `empty_slots`, filled."""
    state: dict[int, dict[str, Any]] = {}
    for number, part in parameters_of(optimizer, once):
        whole = {slot: each.tensor for slot, each in read[number].items()} | dict(numbers.get(part.key, {}))
        if whole:
            state[number] = whole
    groups = optimizer.state_dict()["param_groups"]
    for own, stored in zip(groups, options, strict=True):
        own.update(stored)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _options(names: Sequence[str], group: Mapping[str, Any], facts: OptimizerFacts) -> dict[str, Any]:
    """The options of a checkpoint for the group with the parameters ``names``."""
    if lost := [name for name in names if name not in facts.group]:
        raise RuntimeFault(
            f"the checkpoint has no optimizer for `{lost[0]}`", "give the optimizer the parameters that it had"
        )
    numbers = {facts.group[name] for name in names}
    if len(numbers) > 1:
        raise RuntimeFault(
            f"`{names[0]}` and others of its group had other options in the checkpoint:"
            f" {[facts.options[number] for number in sorted(numbers)]}",
            "make the groups of parameters that the run had",
        )
    return {key: _restored(value, group.get(key)) for number in numbers for key, value in facts.options[number].items()}


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
    if part.first is None or not shape:
        return StatePart(key, torch.zeros(shape, dtype=dtype, device=place), shape)
    if shape[0] != part.shape[0]:
        raise MaterializeError(
            f"`{key}` has {shape[0]} rows, and `{part.key}` {part.shape[0]}", "use a folder per model"
        )
    rows = torch.zeros((len(part.tensor), *shape[1:]), dtype=dtype, device=place)
    return StatePart(key, rows, shape, part.first)


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
    return list(plain) if isinstance(plain, tuple) else plain


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
