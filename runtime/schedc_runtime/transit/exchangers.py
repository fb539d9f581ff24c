"""The table of providers that carry rows of experts, and the choice of one for a layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.providers import TORCH, ProviderTable
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transit.base import ExchangeCase, Exchanger, Transit
from schedc_runtime.transit.carried import LibraryCarrier
from schedc_runtime.transit.deep_ep import DeepEp1, DeepEp2, deep_ep_lacks

_LACKS = """\
hybrid_ep: no adapter yet: its calls give no event, and take weights as a map of all experts
nccl_ep: no adapter yet: its Python bindings wrap the C interface by ctypes, without torch
uccl_ep: no adapter: its wrapper is a package `deep_ep` of DeepEP's interface: name `deep_ep`"""
"""Libraries without an adapter, and what each lacks."""


def _missing(line: str) -> Exchanger:
    """The library of a line of `_LACKS`, which is refused by name."""
    library, _, lack = line.partition(": ")

    def refused(*_: Any) -> Transit:
        raise RuntimeFault(f"exchange {library}: {lack}")

    return Exchanger(library, lambda case: lack, refused)


EXCHANGES = ProviderTable(
    "exchange",
    (
        Exchanger("deep_ep", partial(deep_ep_lacks, "deep_ep"), DeepEp1),
        Exchanger("deep_ep_2", partial(deep_ep_lacks, "deep_ep_2"), DeepEp2),
        *map(_missing, _LACKS.splitlines()),
    ),
)
"""By name. Those without an adapter are refused by name."""


def exchanger_for(name: str, case: ExchangeCase) -> Exchanger:
    """The provider of a layer's exchanges. Raises `RuntimeFault` where it cannot serve."""
    exchanger = EXCHANGES.named(name, TORCH)
    if reason := exchanger.why_not(case):
        raise RuntimeFault(
            f"exchange {name}: {reason}", 'leave providers={"exchange": ...} out, and torch carries rows'
        )
    return exchanger


def carried_by(name: str, layer: MoELayer, group: ExpertGroup, wishes: Mapping[str, object]) -> LibraryCarrier:
    """What carries the rows of a layer by a library. Raises `RuntimeFault` where the library cannot serve.

    wishes: by name, what is asked of the layer and only torch's transport can carry out; false where it is not asked.
    """
    if asked := [wish for wish, value in wishes.items() if value]:
        raise RuntimeFault(
            f"exchange {name} and {asked[0]}: the library packs rows itself, and does not know it",
            f"leave {asked[0]} out, or let torch carry the rows",
        )
    down = layer.experts.down
    sizes = layer.experts.total, layer.router.routing.top, group.size, group.nodes
    processes = group.size > 1 and not group.expert.cooperative
    case = ExchangeCase(down.device, down.dtype, down.shape[2], *sizes, processes)
    exchanger = exchanger_for(name, case)
    return LibraryCarrier(exchanger, exchanger.make(group, case), group)
