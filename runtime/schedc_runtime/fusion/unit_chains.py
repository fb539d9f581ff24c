"""Counts the chains that the units of a recorded stage have, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import fx, nn

from schedc.ir.plan import Level
from schedc.model.fusions import FUSIONS
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.fusion.fused_forward import TORCH_ERRORS, made
from schedc_runtime.fusion.fused_stages import request
from schedc_runtime.partition.recorded_stage import RecordedStage
from schedc_runtime.ranks.exchange import Exchange


def unit_chains(stage: RecordedStage, units: Sequence[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """(unit, number of chains by row) of each unit that has some, for the signature recorded last.

    Units with exchanges, and units that cannot be recorded from inside, are left out.
    """
    for node in stage.current.graph.nodes:
        if node.op != "call_module" or node.target not in units:
            continue
        module = stage.get_submodule(str(node.target))
        if any(isinstance(part, Exchange) for part in module.modules()):
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda given: given.meta["val"])
        wanted = request("", module, Level.NONE, tuple(FUSIONS), False, {})
        try:
            code = made(module, args, kwargs, wanted)
        except (KeyError, RuntimeFault, *TORCH_ERRORS):
            continue
        if code is not None:
            yield str(node.target), {row: code.chains[row] for row in FUSIONS if row in code.chains}


def told_chains(stage: nn.Module, units: Sequence[str]) -> Iterator[str]:
    """A line for the units of a stage that have the same chains: ``rope 2, gated 1 in 4 units``."""
    assert isinstance(stage, RecordedStage)
    total = Counter(", ".join(f"{row} {count}" for row, count in own.items()) for _, own in unit_chains(stage, units))
    for text, count in total.items():
        yield f"{text} in {count} unit{'s' if count > 1 else ''}"
