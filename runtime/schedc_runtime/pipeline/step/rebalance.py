"""Moves experts between ranks, between two steps: all that belongs to a layer's experts moves, or nothing does.

    look at all layers --> [agree] --> by layer: pack --> [agree] --> exchange, stage --> [agree] --> commit

Brackets are agreements of all ranks. An error before the last of a layer leaves this layer as it was on every rank.
Layers before it have moved, with their numbers of places. Copies of a stage, and its replicas, move alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from schedc.ir.program import Program
from schedc_runtime.device.choice import device_for
from schedc_runtime.device.limits import await_event
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.migration.expert_state import ExpertState, digest_of, expert_state
from schedc_runtime.migration.moves import LayerMove
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.placement import ExpertPlaces
from schedc_runtime.pipeline.agree.all_ranks import on_all_ranks
from schedc_runtime.pipeline.agree.counts import Accumulation
from schedc_runtime.pipeline.build.assembly import Assembly

Optimizers = Optimizer | Sequence[Optimizer] | None
"""The optimizers of a process: one, several of other parameters each, or None without any."""
Key = tuple[int, str]
"""A layer of the model: its stage, and its name."""
_Moves = dict[Key, list[LayerMove]]
"""The ways of the layers here; several of one layer where replicas are in this process."""
_WHAT = "moving experts"


class Moved(NamedTuple):
    """What a call of `Pipeline.rebalance` did. experts: by layer with moves, the number of experts at another place.
    bytes: sent from this process to other ranks. choices: in words, by layer here."""

    experts: dict[str, int]
    bytes: int
    choices: dict[str, str]


class ChoosePlaces(Protocol):
    """What says where experts shall lie."""

    def __call__(self, key: Key, layer: MoELayer, _state: ExpertState, /) -> ExpertPlaces:
        """The places of the experts of a layer here."""
        ...


class GivenPlaces:
    """Places by name of the layer; other layers stay."""

    def __init__(self, names: Sequence[str], placements: Mapping[str, ExpertPlaces]) -> None:
        self._names, self._placements = names, placements

    def check(self) -> None:
        """Raise `RuntimeFault` for a name that is no layer's."""
        if unknown := sorted(self._placements.keys() - set(self._names)):
            raise RuntimeFault(
                f"a placement for `{unknown[0]}`, which is no layer of experts",
                f"the layers are {', '.join(self._names)}",
            )

    def __call__(self, key: Key, layer: MoELayer, _state: ExpertState, /) -> ExpertPlaces:
        """The places given for a layer; other layers stay."""
        places = self._placements.get(key[1], layer.experts.placement)
        if len(places.order) != layer.experts.total:
            raise RuntimeFault(
                f"a placement of {len(places.order)} experts for `{key[1]}`, which has {layer.experts.total}",
                "give the expert at each place of the layer",
            )
        return places


class HeldLayers:
    """The layers of experts of all places in this process, and in which rounds layers move.

    placed: each layer with its place in the mesh. rounds: [rounds] layers of the whole model that move at the same
    time; no rank holds two of a round.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.placed = [
            (place, (index, name), layer)
            for place in assembly.places
            for index, stage in sorted(assembly.stages[place].items())
            for name, layer in moe_layers(stage.module)
        ]
        self.here: dict[Key, list[MoELayer]] = {}
        for _, key, layer in self.placed:
            self.here.setdefault(key, []).append(layer)
        names = [
            (stage, name) for stage, module in enumerate(assembly.partition.modules) for name, _ in moe_layers(module)
        ]
        self.rounds = _rounds(assembly.program, names)

    @property
    def names(self) -> list[str]:
        """The names of the model's layers."""
        return [name for keys in self.rounds for _, name in keys]


def _rounds(program: Program, keys: Iterable[Key]) -> list[list[Key]]:
    taken: Counter[int] = Counter()
    rounds: list[list[Key]] = []
    for stage, name in keys:
        ranks = set(program.placement.rank_of_stage[:, stage].tolist())
        number = max(taken[rank] for rank in ranks)
        taken.update({rank: number + 1 - taken[rank] for rank in ranks})
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append((stage, name))
    return rounds


def check_between_steps(assembly: Assembly, accumulation: Accumulation) -> None:
    """Raise `RuntimeFault` where experts cannot move now."""
    if 0 < accumulation.done < accumulation.calls:
        raise RuntimeFault(
            f"{accumulation.done} of {accumulation.calls} calls have added their gradients, whose experts would move",
            "call rebalance behind the optimizer's step",
        )
    for stage in assembly.held():
        stage.check_empty()
    parameters = Counter(
        id(p) for stage in assembly.held() for _, layer in moe_layers(stage.module) for p in layer.experts.parameters()
    )
    if parameters and max(parameters.values()) > 1:
        raise RuntimeFault("two layers share their experts", "leave experts where they are")


def move_experts(
    assembly: Assembly,
    accumulation: Accumulation,
    optimizer: Optimizers,
    layers: HeldLayers,
    choose: ChoosePlaces,
    extra: Sequence[Mapping[str, Tensor]] = (),
) -> Moved:
    """Let the experts of all layers lie where ``choose`` says, equally on all ranks. A collective, between steps.

    Raises `RuntimeFault` on every rank alike for what cannot move, before anything has changed.
    """
    guard = assembly.guard
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)

    def look() -> _Moves:
        check_between_steps(assembly, accumulation)
        if isinstance(choose, GivenPlaces):
            choose.check()
        if assembly.settings.cut.graphs and any(each[0].counter.placed is None for each in layers.here.values()):
            raise RuntimeFault("launches were captured for experts that stay", "write `migrate` into the plan")
        return {
            key: [_move_of(key, layer, choose, expert_state(key[1], layer, optimizers, extra)) for layer in held]
            for key, held in layers.here.items()
        }

    def told(moves: _Moves) -> list[Any]:
        return [[key, *_digests(move), move.experts] for key, held in moves.items() for move in held]

    moves, everyone = on_all_ranks(guard, f"{_WHAT}: looking at what moves", look, told, RuntimeFault)
    _check_alike(guard.control.names, everyone)
    moved = {tuple(key): count for entries in everyone for key, *_, count in entries if count}
    sent = 0
    for number, keys in enumerate(layers.rounds):
        if any(key in moved for key in keys):
            mine = [move for key in keys if key in moved for move in moves.get(key, ())]
            sent += _move_round(assembly, f"{_WHAT}: round {number}", mine)
    return Moved({name: count for (_, name), count in moved.items()}, sent, {})


def _move_of(key: Key, layer: MoELayer, choose: ChoosePlaces, state: ExpertState) -> LayerMove:
    places = choose(key, layer, state)
    if places != layer.experts.placement and not layer.experts.sharded:
        raise RuntimeFault(f"no ranks share the experts of `{key[1]}`", "leave them where they are")
    return LayerMove(layer, places, state)


def _digests(move: LayerMove) -> list[str]:
    """[4] texts that are equal on all ranks of a layer."""
    orders = [move.layer.experts.placement.order, move.placement.order]
    return [*map(digest_of, orders), *move.state.digests]


_ALIKE = ("the present placement", "the placement asked for", "tensors that belong to experts",
          "numbers in the states of optimizers")  # fmt: skip
"""What each text of `_digests` speaks of."""


def _check_alike(names: Sequence[str], everyone: Sequence[Any]) -> None:
    """Raise `RuntimeFault` where ranks differ. everyone: by process, its part of the first agreement."""
    first: dict[Key, tuple[str, list[str]]] = {}
    for name, entries in zip(names, everyone, strict=True):
        for (stage, layer), *texts, _ in entries:
            other, wanted_texts = first.setdefault((stage, layer), (name, texts))
            for what, mine, theirs in zip(_ALIKE, texts, wanted_texts, strict=True):
                if mine != theirs:
                    raise RuntimeFault(
                        f"{other} and {name} differ in {what}, for `{layer}`",
                        "call rebalance with the same arguments on all ranks, behind zero_grad",
                    )


def _move_round(assembly: Assembly, what: str, moves: Sequence[LayerMove]) -> int:
    """Move some layers at the same time, on all ranks or on none; bytes sent from here. A collective."""
    guard = assembly.guard

    def pack() -> None:
        for move in moves:
            move.pack()

    on_all_ranks(guard, f"{what}, packing", pack, raised=RuntimeFault)
    with guard(f"{what}, exchanging"):
        for move in moves:
            move.start()
        for move in moves:
            move.stage()
        device = device_for(assembly.device)
        await_event(device, device.record())
        guard.control.agree(f"{what}, before the copy", None)
        for move in moves:
            move.commit()
    return sum(move.bytes_sent for move in moves)
