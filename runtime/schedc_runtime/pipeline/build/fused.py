"""Lets the blocks of a pipeline run with fused chains, where the plan says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from schedc.ir.plan import Fuse
from schedc.model.fusions import COMPILED, FUSIONS
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.stage.stage import Stage

if TYPE_CHECKING:
    from schedc_runtime.compiled.settings import CompileSettings
    from schedc_runtime.fusion.fused_stages import FusedStages


def check_exact(fuse: Fuse | None) -> None:
    """Refuses what rounds otherwise where results are compared bit by bit; `auto` passes. Raises `RuntimeFault`."""
    rounding = [name for name in fuse.names if not FUSIONS[name].exact] if fuse is not None else []
    if fuse is not None and (rounding or fuse.compiled):
        what = rounding[0] if rounding else COMPILED
        raise RuntimeFault(
            f"fuse {what}: gradients round otherwise, and bits are to be compared",
            f"leave `{what}` out of the line, or `--check bitwise` out",
        )


def fused_blocks(
    fuse: Fuse | None, compile: CompileSettings | None, stages: Iterable[Stage], aliases: Mapping[str, str]
) -> FusedStages | None:
    """The fused blocks of ``stages``; None without a plan's line. Their code is made at their first calls.

    Raises `RuntimeFault` beside ``compile``.
    """
    if fuse is None:
        return None
    if compile is not None:
        raise RuntimeFault(
            "compile= and `fuse` in the plan exclude each other: torch.compile fuses what it compiles",
            "leave `fuse` out of the plan, or compile= out of the pipeline; `fuse auto compiled` lets torch.compile"
            " make the kernels of the chains",
        )
    from schedc_runtime.fusion.fused_stages import FusedStages

    return FusedStages(fuse, stages, aliases)
