"""Chooses where experts lie by the loads of the last steps, as ``migrate`` in a plan says, and lets them move there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from schedc.cell import CellCosts
from schedc_runtime.device.choice import HostCopy
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.migration.candidates import MoveTerms, choose_places
from schedc_runtime.migration.expert_state import ExpertState
from schedc_runtime.migration.forecast import forecast
from schedc_runtime.migration.price import move_time
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.placement import ExpertPlaces
from schedc_runtime.pipeline.agree.counts import Accumulation
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.step.bias_updates import summed_over_replicas
from schedc_runtime.pipeline.step.rebalance import GivenPlaces, HeldLayers, Key, Moved, Optimizers, move_experts


def rebalance(
    assembly: Assembly,
    accumulation: Accumulation,
    trained: int,
    optimizer: Optimizers,
    placement: Mapping[str, Sequence[int]] | None,
    extra: Sequence[Mapping[str, Tensor]],
) -> Moved:
    """`Pipeline.rebalance`. trained: training steps so far. extra: state dicts [local experts, ...]."""
    assembly.guard.check()
    migrate = assembly.plan.migrate
    if placement is not None:
        layers = HeldLayers(assembly)
        given = GivenPlaces(layers.names, {name: ExpertPlaces(tuple(order)) for name, order in placement.items()})
        return move_experts(assembly, accumulation, optimizer, layers, given, extra)
    if migrate is None:
        raise RuntimeFault(
            "rebalance without a placement, and the plan has no `migrate`",
            "write `migrate every 50 steps`, or give a placement",
        )
    if not trained or trained % migrate.steps or assembly.mesh.experts == 1:
        return Moved({}, 0, {})
    layers = HeldLayers(assembly)
    chosen = ForecastPlaces(assembly, layers)
    moved = move_experts(assembly, accumulation, optimizer, layers, chosen, extra)
    return moved._replace(choices=chosen.choices)


class ForecastPlaces:
    """The best places by the forecast of each layer here. A collective of all ranks, which exchange loads.

    choices: in words, by name of the layer.
    """

    def __init__(self, assembly: Assembly, layers: HeldLayers) -> None:
        self._assembly, self.choices = assembly, dict[str, str]()
        self._loads = _summed_loads(assembly, layers)

    def __call__(self, key: Key, layer: MoELayer, state: ExpertState, /) -> ExpertPlaces:
        """The best places of a layer here; those that it has before any step was counted."""
        if (loads := self._loads.get(key)) is None or not loads.any():
            return layer.experts.placement
        guess, terms = forecast(loads), self._terms(layer, state, float(loads.mean(0).sum()))
        choice = choose_places(guess.share, layer.experts.placement, terms)
        self.choices[key[1]] = f"{choice.told(terms)}; forecast by {guess.rule}, error {guess.error:.3f}"
        return choice.places

    def _terms(self, layer: MoELayer, state: ExpertState, choices: float) -> MoveTerms:
        """choices: mean of a step, on all ranks that hold the layer."""
        assembly, group, routing = self._assembly, layer.routing.group, layer.router.routing
        plan, migrate, mesh = assembly.plan, assembly.plan.migrate, assembly.mesh
        assert migrate is not None
        copies = assembly.program.placement.rank_of_stage.shape[0]
        rows = choices / (group.size * mesh.expert_groups * copies)
        down, costs = layer.experts.down, assembly.settings.cells
        row_bytes = down.shape[2] * down.element_size()
        way = move_time(
            state.bytes_of_expert, row_bytes, rows, group.size, costs if isinstance(costs, CellCosts) else None
        )  # fmt: skip
        links = plan.topology
        near = links.rail / links.node if links and links.rail and links.node else 1.0
        return MoveTerms(
            ranks=group.size,
            per_node=group.per_node,
            node=way * near if group.nodes > 1 else way,
            rail=way,
            steps=migrate.steps,
            least=migrate.gain / 100,
            by_node=plan.balance is not None and group.nodes > 1,
            unit=routing.experts // routing.groups if routing.groups > 1 else 1,
        )


def _summed_loads(assembly: Assembly, layers: HeldLayers) -> dict[Key, NDArray[np.int64]]:
    """[steps, experts] choices of the last steps, by layer here: of all ranks that hold the layer."""
    keys, places, tensors = list[Key](), [], list[Tensor]()
    for place, key, layer in layers.placed:
        if layer.history is not None and (loads := layer.history.loads) is not None:
            keys.append(key)
            places.append((place, key[0]))
            tensors.append(loads)
    with assembly.guard("gathering the loads of experts"):
        copies = [HostCopy(total) for total in summed_over_replicas(assembly, places, tensors)]
        return {key: copy.join().numpy() for key, copy in zip(keys, copies, strict=True)}
