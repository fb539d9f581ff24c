"""Copies of experts over the steps of a pipeline: lent around each training step, and kept in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

from schedc.ir.ops import OpKind
from schedc.ir.program import Program
from schedc_runtime.data_parallel.hot_returns import lenders_of
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.step_lender import StepLender
from schedc_runtime.moe.step_plan import Held
from schedc_runtime.pipeline.build.stages import StagesByIndex
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.ranks.mesh import Coordinate

BalanceState = dict[str, list[list[int]]]
"""[ranks] the experts of which each rank of the group has copies in the next step. Hot ones have copies everywhere.

Keys are pipeline rank, expert group, stage and name of the layer."""


class HotSteps:
    """Who lends experts by step on the stages of all places in this process.

    experts: ranks that share their experts. control: gathers what all ranks know.
    """

    def __init__(
        self, stages: Mapping[Coordinate, StagesByIndex], program: Program, experts: int, control: ControlPlane
    ) -> None:
        self._control = control
        self._first: list[StepLender] = []
        self._lenders: dict[str, list[StepLender]] = {}
        for place, held in stages.items():
            lenders = [
                lender for index in _forward_order(program, place.pipeline) for lender in lenders_of(held[index])
            ]
            self._first += lenders[:1]
            for lender, after in pairwise(lenders):
                lender.after = after
            for index, stage in sorted(held.items()):
                for number, (name, layer) in enumerate(moe_layers(stage.module)):
                    if layer.lender is not None:
                        layer.lender.place = index, number
                        key = f"{place.pipeline}.{place.replica // experts}.{index}.{name}"
                        self._lenders.setdefault(key, []).append(layer.lender)

    def step(self, training: bool) -> AbstractContextManager[None]:
        """Around a call of the pipeline: experts are lent where it trains. A step that fails leaves nothing lent.

        The weights of a rank's first layer begin to travel; those of a later layer when the one before joins its own.
        """
        return self._lent() if training and self._lenders else nullcontext()

    @contextmanager
    def _lent(self) -> Iterator[None]:
        try:
            for lender in self._every():
                lender.begin()
            for lender in self._first:
                lender.start()
            yield
        finally:
            for lender in self._every():
                lender.leave()

    def commit(self) -> None:
        """The step has succeeded on all ranks: the next step's copies follow from the step's rows."""
        for lender in self._every():
            lender.commit()

    def state(self) -> BalanceState:
        """The copies of the next step. A collective of all ranks, and the same on all of them."""
        everyone = self._control.gather("collecting the copied experts", self.mine())
        return dict(sorted((key, held) for part in everyone for key, held in part.items()))

    def mine(self) -> BalanceState:
        """This rank's part of `state`."""
        return {key: _experts(lenders[0], lenders[0].choose()) for key, lenders in self._lenders.items()}

    def of_layers(self, state: Mapping[str, Sequence[Any]]) -> BalanceState | None:
        """What ``state``, perhaps of another schedule, says of the layers here. None where it lacks a layer.

        Raises `RuntimeFault` for copies that a layer cannot have.
        """
        known = {_layer(key): held for key, held in state.items()}
        found: BalanceState = {}
        for key, lenders in self._lenders.items():
            told = state.get(key, known.get(_layer(key)))
            held = None if told is None else lenders[0].fitted(_numbered(told, lenders[0].experts.placement.places))
            if held is None:
                return None
            _check(key, held, lenders[0])
            found[key] = _experts(lenders[0], held)
        return found

    def load(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Take a `state`. A collective of all ranks. Raises `RuntimeFault` for a state of another kind of pipeline."""
        everyone = self._control.gather("loading the copied experts", sorted(self._lenders))
        keys = {key for part in everyone for key in part}
        if different := sorted(keys ^ set(state)):
            missing = different[0] in keys
            raise RuntimeFault(
                f"the state of copied experts {'lacks' if missing else 'has'} `{different[0]}`, and the pipeline"
                f" {'lends there' if missing else 'lends nothing there'}",
                "load the state of the same program, plan and mesh; or load none: the first step then lends none",
            )
        for key, lenders in self._lenders.items():
            for lender in lenders:
                held = _held(state[key], lender)
                _check(key, held, lender)
                lender.set_next(held)

    def _every(self) -> Iterator[StepLender]:
        return (lender for lenders in self._lenders.values() for lender in lenders)


def _layer(key: str) -> tuple[str, str]:
    """The expert group and the layer of a `BalanceState`'s key."""
    _, group, _, layer = key.split(".", 3)
    return group, layer


def _experts(lender: StepLender, held: Held) -> list[list[int]]:
    """[ranks] the experts of copies, by number, wherever they lie."""
    return _numbered(held, lender.experts.placement.order)


def _numbered(told: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """Copies, or hot experts, by other ``numbers`` [experts]; what is no expert stays."""
    if not all(isinstance(each, int) for each in told):
        return [_numbered(each, numbers) for each in told]
    return [numbers[each] if 0 <= each < len(numbers) else each for each in told]


def _forward_order(program: Program, rank: int) -> list[int]:
    """The stages of a rank in the order of their first F."""
    ops = (op for item in program.instructions(rank) if item.computes for op in item.ops)
    return list(dict.fromkeys(stage for kind, stage, _ in ops if kind is OpKind.F))


def _held(told: Sequence[Any], lender: StepLender) -> Held:
    """The copies of a state, by place, as they stand there: what fits other ranks is not read here."""
    by_place = _numbered(told, lender.experts.placement.places)
    if all(isinstance(each, list) for each in by_place):
        return tuple(map(tuple, by_place))
    return lender.fitted(by_place) or ()


def _check(key: str, held: Held, lender: StepLender) -> None:
    if why := lender.refusal(held):
        raise RuntimeFault(
            f"the state of copied experts has {why}, at `{key}`",
            "load the state that `balance_state()` of the same model and plan has given",
        )
