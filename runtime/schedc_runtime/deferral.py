"""Which stages need no deferred weight gradients, and get their layers' plain forwards back.

Handing weight work to a sink costs some 20 us per layer. A program without W never defers, and autograd's own weight
gradients then have the same bits, unless a weight is used twice by one microbatch: autograd adds the two uses before
it adds them to the gradient, the sink adds them one by one, and the serial reference uses the sink.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from schedc.ir.program import InstructionKind, Program
from schedc_runtime.stage import Stage
from schedc_runtime.weightgrad import uninstall


@contextmanager
def counting_uses(modules: Sequence[nn.Module]) -> Iterator[Counter[int]]:
    """Counts, by id, how often each parameter's layer is called inside the block."""
    uses: Counter[int] = Counter()
    layers = {id(layer): layer for module in modules for layer in module.modules()}
    # Looked up before any call: while boundaries are inferred, others stand in for the parameters.
    own = {key: [id(parameter) for parameter in layer.parameters(recurse=False)] for key, layer in layers.items()}

    def count(layer: nn.Module, _: object) -> None:
        uses.update(own[id(layer)])

    hooks = [layer.register_forward_pre_hook(count) for layer in layers.values()]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()


def spare_deferral(program: Program, stages: Sequence[Stage], modules: Sequence[nn.Module], uses: Counter[int]) -> None:
    """Take the deferral out of ``stages`` where it serves nothing.

    modules: [stages] those that ``uses`` were counted on; a second copy of a stage is called as the first.
    """
    if (program.kind == InstructionKind.W).any():
        return
    for stage in stages:
        if all(uses[id(parameter)] <= 1 for parameter in modules[stage.index].parameters()):
            uninstall(stage.module)
