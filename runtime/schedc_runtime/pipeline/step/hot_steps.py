"""Hot experts over the steps of a pipeline: lent around each training step, and kept in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise

from schedc.ir.ops import OpKind
from schedc.ir.program import Program
from schedc_runtime.data_parallel.hot_returns import lenders_of
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.hot_slots import StepLender
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.pipeline.build.stages import StagesByIndex
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.ranks.mesh import Coordinate

HotState = dict[str, list[int]]
"""The experts that are hot in the next step, by pipeline rank, expert group, stage and name of the layer."""


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
                for name, layer in moe_layers(stage.module):
                    if layer.lender is not None:
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
        """The step has succeeded on all ranks: the next one follows its rows."""
        for lender in self._every():
            lender.commit()

    def state(self) -> HotState:
        """The experts that are hot in the next step. A collective of all ranks, and the same on all of them."""
        everyone = self._control.gather("collecting the hot experts", self.mine())
        return dict(sorted((key, hot) for part in everyone for key, hot in part.items()))

    def mine(self) -> HotState:
        """What this rank knows of `state`."""
        return {key: _experts(lenders[0]) for key, lenders in self._lenders.items()}

    def of_layers(self, state: Mapping[str, Sequence[int]]) -> HotState | None:
        """What ``state``, perhaps of another schedule, says of the layers here. None where it lacks a layer.

        Raises `RuntimeFault` for experts that a layer does not have.
        """
        known = {_layer(key): list(hot) for key, hot in state.items()}
        own = {key: state.get(key, known.get(_layer(key))) for key in self._lenders}
        found = {key: list(hot) for key, hot in own.items() if hot is not None}
        for key, hot in found.items():
            _check(key, hot, self._lenders[key][0])
        return found if len(found) == len(own) else None

    def load(self, state: Mapping[str, Sequence[int]]) -> None:
        """Take a `state`. A collective of all ranks. Raises `RuntimeFault` if it is not one of such a pipeline."""
        everyone = self._control.gather("loading the hot experts", sorted(self._lenders))
        keys = {key for part in everyone for key in part}
        if different := sorted(keys ^ set(state)):
            missing = different[0] in keys
            raise RuntimeFault(
                f"the state of hot experts {'lacks' if missing else 'has'} `{different[0]}`, and the pipeline"
                f" {'lends there' if missing else 'lends nothing there'}",
                "load the state of the same program, plan and mesh; or load none: the first step then lends none",
            )
        for key, lenders in self._lenders.items():
            for lender in lenders:
                _check(key, state[key], lender)
                lender.set_next([lender.experts.placement.places[expert] for expert in state[key]])

    def _every(self) -> Iterator[StepLender]:
        return (lender for lenders in self._lenders.values() for lender in lenders)


def _layer(key: str) -> tuple[str, str]:
    """The expert group and the layer of a `HotState`'s key."""
    _, group, _, layer = key.split(".", 3)
    return group, layer


def _experts(lender: StepLender) -> list[int]:
    """The experts that are hot in the next step, ascending, wherever they lie."""
    order = lender.experts.placement.order
    return sorted(order[place] for place in lender.choose())


def _forward_order(program: Program, rank: int) -> list[int]:
    """The stages of a rank in the order of their first F."""
    ops = (op for item in program.instructions(rank) if item.computes for op in item.ops)
    return list(dict.fromkeys(stage for kind, stage, _ in ops if kind is OpKind.F))


def _check(key: str, hot: Sequence[int], lender: StepLender) -> None:
    total, most = lender.experts.total, lender.policy.most
    assert most is not None
    if len(set(hot)) != len(hot) or len(hot) > most or not all(0 <= expert < total for expert in hot):
        raise RuntimeFault(
            f"the state of hot experts has {list(hot)} at `{key}`, of {total} experts and {most} slots",
            "load the state that `hot_state()` of the same model and plan has given",
        )
