"""Compares what all ranks must have alike at a step besides program and batch: modes, frozen parameters, settings.

Digests travel with the request of the step. Only where two differ do ranks exchange the facts, to name the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from schedc_runtime.errors import RanksDisagree
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.partition.reads import Reads
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.stage.module_tree import in_tables, requiring
from schedc_runtime.stage.stage import Stage

Facts = dict[str, str]
"""Values by what they are values of, as `<kind> <name>`; kinds are those of `_KINDS`."""
Digests = list[tuple[str, dict[str, str]]]
"""By name of a rank: digests by what they are of, a stage's number or `_EVERYWHERE`."""
_EVERYWHERE = "everywhere"


class Kind(NamedTuple):
    """What the error says of a difference. says: with the name of what differs. help: what to do."""

    says: str
    help: str


_MODE = "call train() and eval() of the model, or pipe.train(), on every rank alike"
_KINDS = {
    "autocast": Kind("autocast is", "enter autocast around the call on every rank, with one dtype"),
    "gradients": Kind("gradients are", "enter no_grad and inference_mode on every rank, or on none"),
    "model": Kind("the model `{}` is", _MODE),
    "stages": Kind("its stages of `{}` are", _MODE),
    "module": Kind("the module `{}` is", _MODE),
    "around": Kind("the module `{}` is", _MODE),
    "reads": Kind("`{}`, which the model's forward reads between its units, is", "change it alike on every rank"),
    "parameter": Kind("the parameter `{}` is", "set requires_grad alike on every rank that holds the parameter"),
    "settings": Kind("the experts of `{}` are attached with", "attach them alike on every rank that holds the layer"),
    "biases": Kind("the biases of `{}` were updated", "call pipe.update_biases() on all ranks, equally often"),
    "update_biases": Kind("update_biases() was called", "call pipe.update_biases() on all ranks, equally often"),
}
"""The kinds of facts, in the order in which differences are reported."""
_mode = attrgetter("training")
_TRAINING = {True: "in training mode", False: "in evaluation mode"}


class StageFacts:
    """The facts of one stage here, with the digest of the last ones of a training step and of an evaluation."""

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_modules())
        # The stage itself, and empty modules on the way to others, are not the model's own.
        self._modules = [(name, part) for name, part in named if name and type(part) is not nn.Module]
        self._parts = [part for _, part in self._modules]
        self._prefixes, self._tables = [name for name, _ in named], [part._parameters for _, part in named]
        self._layers = list(moe_layers(module))
        self._last: dict[bool, tuple[tuple[Any, ...], str]] = {}

    def digest(self, training: bool) -> str:
        """The digest of `facts`, computed where these have changed."""
        state = self._state(training)
        last = self._last.get(training)
        if last is None or last[0] != state:
            self._last[training] = last = state, _digest(self.facts(training))
        return last[1]

    def facts(self, training: bool) -> Facts:
        """Settings and updates of MoE layers; in training also the modes of modules, and what is frozen."""
        facts = {f"settings {name}": _shown(layer.settings) for name, layer in self._layers}
        facts |= {f"biases {name}": _times(layer.updates) for name, layer in self._layers}
        if training:
            facts |= {f"module {name}": _TRAINING[module.training] for name, module in self._modules}
            facts |= {
                f"parameter {prefix}{'.' if prefix else ''}{name}": "trained" if parameter.requires_grad else "frozen"
                for prefix, table in zip(self._prefixes, self._tables, strict=True)
                for name, parameter in table.items()
                if parameter is not None
            }
        return facts

    def _state(self, training: bool) -> tuple[Any, ...]:
        """What `facts` follows from, read without a name: this runs at every step."""
        layers = [(layer.settings, layer.updates) for _, layer in self._layers]
        if not training:
            return (layers,)
        return layers, list(map(_mode, self._parts)), requiring(in_tables(self._tables))


class StepFacts:
    """The facts of all places of this process. updates: number of calls of `Pipeline.update_biases`."""

    def __init__(self, reads: Reads, stages: Mapping[Coordinate, Mapping[int, Stage]], mesh: Mesh, kind: str) -> None:
        self._reads, self._stages, self._mesh, self._device = reads, stages, mesh, kind
        self._model = reads.model
        self.updates = 0
        self._casts = torch.amp.is_autocast_available(kind)
        self._last: tuple[Any, ...] = ()
        self._digest = ""
        self.refresh()

    def refresh(self) -> None:
        """Look up the modules again, after some were replaced."""
        self._held = [
            (self._mesh.name(place), {str(index): StageFacts(stage.module) for index, stage in held.items()})
            for place, held in self._stages.items()
        ]
        self._modules = [stage.module for held in self._stages.values() for stage in held.values()]

    def digests(self, training: bool, gradients: bool) -> Digests:
        """What travels with a request. gradients: whether they were enabled around the call."""
        self._reads.refresh()
        state = training, self._around(training, gradients), self._reads.state(training)
        if state != self._last:
            facts = {**self._everywhere(training, gradients), "reads ": state[2]}
            self._last, self._digest = state, _digest(facts)
        return [
            (name, {_EVERYWHERE: self._digest, **{index: each.digest(training) for index, each in held.items()}})
            for name, held in self._held
        ]

    def facts(self, keys: Sequence[str], training: bool, gradients: bool) -> list[tuple[str, Facts]]:
        """By name of a rank: the facts behind the digests of ``keys``."""
        described = []
        for name, held in self._held:
            facts = {**self._everywhere(training, gradients), **self._read(training)} if _EVERYWHERE in keys else {}
            for index in keys:
                facts |= held[index].facts(training) if index in held else {}
            described.append((name, facts))
        return described

    def _read(self, training: bool) -> Facts:
        """What the forward reads between units, and the modes of the modules there."""
        facts = {f"reads {name}": value for name, value in self._reads.facts().items()}
        modes = self._reads.modes() if training else {}
        return facts | {f"around {name}": _TRAINING[mode] for name, mode in modes.items() if name}

    def _around(self, training: bool, gradients: bool) -> tuple[Any, ...]:
        """What `_everywhere` follows from: autocast's dtype or None, updates, gradients, modes of model and stages."""
        kind = self._device
        dtype = torch.get_autocast_dtype(kind) if self._casts and torch.is_autocast_enabled(kind) else None
        if not training:
            return dtype, self.updates
        computed = gradients and not torch.is_inference_mode_enabled()
        return dtype, self.updates, computed, self._model.training, *map(_mode, self._modules)

    def _everywhere(self, training: bool, gradients: bool) -> Facts:
        dtype, updates, *modes = self._around(training, gradients)
        cast = "off" if dtype is None else f"{str(dtype).removeprefix('torch.')} on {self._device}"
        facts = {"autocast ": cast, "update_biases ": _times(updates)}
        if training:
            model, (computed, of_model, *of_stages) = type(self._model).__name__, modes
            facts["gradients "] = "on" if computed else "off"
            facts[f"model {model}"] = _TRAINING[of_model]
            facts[f"stages {model}"] = " and ".join(_TRAINING[mode] for mode in sorted(set(of_stages)))
        return facts


def differing(everyone: Sequence[Digests]) -> list[str]:
    """The keys of digests with different values on two ranks, sorted. everyone: [processes]."""
    first: dict[str, str] = {}
    pairs = [pair for process in everyone for _, digests in process for pair in digests.items()]
    return sorted({key for key, digest in pairs if first.setdefault(key, digest) != digest})


def check_facts(everyone: Sequence[Sequence[tuple[str, Facts]]]) -> None:
    """Raise `RanksDisagree`, the same on every rank, for the first fact in which ranks differ.

    everyone: [processes] as of `StepFacts.facts`.
    """
    values: dict[str, dict[str, str]] = {}
    for name, facts in (place for process in everyone for place in process):
        for what, value in facts.items():
            values.setdefault(what, {})[name] = value
    different = {what: by_rank for what, by_rank in values.items() if len(set(by_rank.values())) > 1}
    for kind, (says, help) in _KINDS.items():
        if told := [what for what in different if what.split(" ", 1)[0] == kind]:
            named = says.format(told[0].split(" ", 1)[1])
            more = f" ({len(told) - 1} more differ)" if len(told) > 1 else ""
            raise RanksDisagree(f"{named} {_contrast(different[told[0]])}{more}", help)


def _contrast(by_rank: Mapping[str, str]) -> str:
    """The value that the fewest ranks have, with the first of them, beside that of the others."""
    ranks, name = odd_ranks(by_rank)
    odd = next(value for rank, value in by_rank.items() if rank == ranks.split(",")[0])
    return f"{odd} on {ranks}, and {by_rank[name]} on {name}"


def odd_ranks(by_rank: Mapping[str, Hashable]) -> tuple[str, str]:
    """The ranks with the value that the fewest have, and the first rank with another."""
    counts = Counter(by_rank.values())
    odd = min(reversed(counts), key=lambda value: counts[value])
    ranks = [name for name, value in by_rank.items() if value == odd]
    name = next(name for name, value in by_rank.items() if value != odd)
    return f"{', '.join(ranks[:4])}{', ...' if len(ranks) > 4 else ''}", name


def _digest(facts: Facts) -> str:
    return blake2b(repr(sorted(facts.items())).encode(), digest_size=8).hexdigest()


def _shown(settings: Sequence[Any]) -> str:
    return ", ".join(map(str, settings))


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"
