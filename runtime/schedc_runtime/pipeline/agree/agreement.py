"""Whether all ranks were built from the same program, plan and model: fingerprints, exchanged and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from schedc.ir.program import Program
from schedc.plan import Plan
from schedc_runtime.data_parallel.gradient_sums import is_part
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.stage.stage import Stage

_COLUMNS = (
    "rank_start", "kind", "stage", "microbatch", "stage2", "microbatch2", "backward", "peer", "message", "batch",
    "communicators",
)  # fmt: skip
"""The columns of a program that must be equal on all ranks."""


def fingerprint(
    program: Program,
    names: Mapping[str, Any],
    blocks: Sequence[Sequence[str]],
    copies: Sequence[Stage],
    cells: Mapping[str, Any],
) -> dict[str, str]:
    """Digests for comparison between ranks: program, model, blocks of stages, copied weights.

    Experts and parts of split products are not compared: the ranks of a group hold different ones.

    names: shape and dtype of each entry of the model's state. blocks: [stages] names, as of a `Partition`.
    copies: the stages here that another rank holds, too. Weights on the meta device are not compared.
    cells: the order inside each instruction of the stages here, which expert ranks must have in common.
    """
    weights = {
        f"weights of stage {stage.index}": _digest(*[_bytes(p) for p in stage.module.parameters() if not is_part(p)])
        for stage in copies
        if not any(p.is_meta for p in stage.module.parameters())
    }
    frozen = {
        f"frozen parameters of stage {stage.index}": repr([p.requires_grad for p in stage.module.parameters()])
        for stage in copies
    }
    return {
        "program": program_digest(program),
        "model": _digest(repr(sorted(names.items())).encode()),
        "layout of blocks on stages": _digest(repr(blocks).encode()),
        **frozen,
        **weights,
        **{f"cell {name}": _digest(repr(cell).encode()) for name, cell in cells.items()},
    }


def program_digest(program: Program) -> str:
    """A digest of what all ranks must have in common of a program."""
    return _digest(*(getattr(program, name).tobytes() for name in _COLUMNS))


def plan_prints(plan: Plan, stages: Iterable[Stage]) -> dict[str, str]:
    """What else all ranks must have in common: each field of the plan, how tokens choose, and measured kernels."""
    layers = [pair for stage in stages for pair in moe_layers(stage.module)]
    return {
        **{f"plan, in `{field.name}`": repr(getattr(plan, field.name)) for field in fields(plan)},
        **{f"routing of `{name}`": repr(layer.router.routing) for name, layer in layers},
        **{
            f"kernels of `{name}`": repr(layer.experts.measured.families)
            for name, layer in layers
            if layer.experts.measured is not None
        },
    }


def difference(everyone: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """In what two ranks differ that both have; "" if in nothing.

    everyone: [processes] the fingerprints of each. names: [processes] names for the error.
    """
    first: dict[str, tuple[str, str]] = {}
    for name, prints in zip(names, everyone, strict=True):
        for what, digest in prints.items():
            first_name, first_digest = first.setdefault(what, (name, digest))
            if first_digest != digest:
                return f"{first_name} and {name} differ in their {what}"
    return ""


def check_fingerprints(different: str) -> None:
    """Raise `RuntimeFault` for a `difference`."""
    if different:
        raise RuntimeFault(
            different, "build the same program and plan and, with the same seed, the same model on every rank"
        )


def _bytes(parameter: Tensor) -> bytes:
    # A copy, since memory that numpy has seen cannot be freed by FSDP2 any more.
    flat = parameter.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _digest(*parts: bytes) -> str:
    return sha256(b"".join(parts)).hexdigest()
