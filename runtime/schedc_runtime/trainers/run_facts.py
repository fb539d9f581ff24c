"""Checks what ranks have said of a run's state before any of it is used. It may come from a stranger's file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from schedc_runtime.checkpoint.stored import reading

_TYPES = {"steps": int, "seed": int, "replica": int, "optimizer": list, "aliases": dict, "hot": dict, "states": dict}
"""What a rank says of its state, as of `run_state`."""


def check_run_facts(everyone: Sequence[Mapping[str, Any]], names: Collection[str]) -> None:
    """Raise `MaterializeError` for facts that `run_state` would not write.

    everyone: [ranks] the facts of each. names: of the model's parameters and buffers.
    """
    for rank, facts in enumerate(everyone):
        with reading(f"what rank {rank} has said of the run"):
            if {name: type(each) for name, each in facts.items()} != _TYPES:
                raise ValueError("its entries are not those of a run's state")
            if not (0 <= facts["steps"] < 1 << 63 and 0 <= facts["replica"] < 1 << 31):
                raise ValueError(f"steps are {facts['steps']}, the replica {facts['replica']}")
            if not all(isinstance(first, str) for first in facts["aliases"].values()):
                raise ValueError("an alias is no name")
            if not all(map(_are_experts, facts["hot"].values())):
                raise ValueError("experts of copies are no numbers")
            if not all(key.count(".") >= 3 for key in facts["hot"]):
                raise ValueError("hot experts are of no layer")
            _check_optimizer(facts["optimizer"])
            _, group, numbers = facts["optimizer"][:3]
            used = [*facts["aliases"], *facts["aliases"].values(), *group, *numbers]
            if unknown := sorted(set(used) - set(names)):
                raise ValueError(f"the model has no `{unknown[0]}`")


def check_further(further: Any) -> None:
    """Raise `ValueError` for other states than `further_states` gives."""
    if not isinstance(further, dict) or {name: type(each) for name, each in further.items()} != {
        "states": dict, "generators": dict,
    }:  # fmt: skip
        raise ValueError("the further states have other entries")


def _check_optimizer(facts: Sequence[Any]) -> None:
    """Raise `ValueError` for what is no `OptimizerFacts`."""
    if [type(each) for each in facts] not in ([list, dict, dict], [list, dict, dict, list]):
        raise ValueError("the optimizer's facts are not options, groups and numbers")
    options, group, numbers = facts[:3]
    for place in (places := facts[3] if len(facts) > 3 else []):
        if not isinstance(place, list) or [type(each) for each in place] != [int, int, str]:
            raise ValueError("the place of a group is none")
    if places and len(places) != len(options):
        raise ValueError("a group of the optimizer has no place")
    if not _are(dict, options) or not _are(dict, numbers.values()) or not _are(int, group.values()):
        raise ValueError("the optimizer's facts have other types")
    if not all(0 <= number < len(options) for number in group.values()):
        raise ValueError("a group of the optimizer has no options")


def _are_experts(told: Any) -> bool:
    """Whether these are experts by rank, or the hot experts of all ranks, which older runs have written."""
    return _are(int, told) or (_are(list, told) and all(_are(int, each) for each in told))


def _are(kind: type, values: Iterable[Any]) -> bool:
    """Whether all ``values`` are of exactly this type."""
    return isinstance(values, Iterable) and all(type(each) is kind for each in values)
