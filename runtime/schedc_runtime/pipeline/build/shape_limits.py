"""Refuses lists of microbatches, and several shapes of them, beside what takes all microbatches for alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from schedc_runtime.pipeline.agree.batch import Agreement, BatchRefused
from schedc_runtime.pipeline.agree.shapes import shapes_in
from schedc_runtime.pipeline.build.assembly import Assembly

_LIMITS: Mapping[str, Callable[[Assembly], bool]] = {
    "`Cut(graphs=...)`: a graph has one shape": lambda assembly: bool(assembly.settings.cut.graphs),
    "`compile=`: units would be compiled for each shape inside of a step": lambda assembly: (
        assembly.compile is not None
    ),
    "`fuse`: chains are recorded for one shape": lambda assembly: assembly.fused is not None,
    "`recompute adaptive`: it compares microbatches with each other": lambda assembly: any(
        stage.recomputation.adaptive is not None for stage in assembly.held()
    ),
    "`offload`: buffers on the host are planned for one shape": lambda assembly: bool(assembly.plan.offload),
    "`tokens`: the plan says how many a microbatch has": lambda assembly: bool(assembly.plan.tokens),
    "bounded exchanges: their buffers have one size": lambda assembly: assembly.plan.bound is not None,
    "`capacity`: it has not been tried": lambda assembly: assembly.plan.capacity is not None,
    "`hot`: it compares the rows of microbatches": lambda assembly: assembly.plan.hot is not None,
    "`balance`: it compares the rows of microbatches": lambda assembly: assembly.plan.balance is not None,
}
"""By what excludes several shapes, and why: whether a pipeline has it."""


def check_listed(assembly: Assembly, agreed: Agreement) -> None:
    """Raise `BatchRefused`, on every rank alike, for a list of microbatches that this pipeline cannot run."""
    if not agreed.listed:
        return
    if assembly.fixed:
        raise BatchRefused(f"a list of microbatches: {assembly.fixed[0]}", "pass a whole batch")
    several = len(shapes_in(agreed.signature, agreed.listed)[0]) > 1
    if several and (reason := next((text for text, has in _LIMITS.items() if has(assembly)), "")):
        raise BatchRefused(
            f"microbatches of several shapes and {reason}", "leave one of the two out, or pad to one shape"
        )
