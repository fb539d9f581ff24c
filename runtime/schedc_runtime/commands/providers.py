"""``schedc providers``: lists who can do each part of a step, from which package, and why one is refused here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from schedc.diagnostics import clean
from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.fusion.norms import NORMS, NormCase
from schedc_runtime.head_loss.chunks import wide_type
from schedc_runtime.loss_providers import LOSSES, LossCase
from schedc_runtime.moe.products import PROVIDERS, Case
from schedc_runtime.providers import TORCH, ProviderTable, offers
from schedc_runtime.transit.base import ExchangeCase
from schedc_runtime.transit.exchangers import EXCHANGES

TABLES: Mapping[str, ProviderTable[Any]] = {table.kind: table for table in (PROVIDERS, EXCHANGES, LOSSES, NORMS)}
OWN = "schedc"
"""The package of the project's own providers."""


class FoundProvider(NamedTuple):
    """A row of the list. kind: empty for a package that does not load. refused: why it cannot serve, else empty."""

    kind: str
    name: str
    package: str
    refused: str


def found(device: torch.device, dtype: torch.dtype, width: int) -> Iterator[FoundProvider]:
    """All providers, by kind. Each is asked about a layer of ``width`` columns, whose rows have ``dtype``.

    Experts have four times these columns. An exchange is among 8 ranks of one node, with 64 experts and top 8.
    """
    cases: Mapping[str, Any] = {
        "products": Case(device, dtype, (width, 4 * width, 4 * width), padded=False),
        "exchange": ExchangeCase(device, dtype, width, 64, 8, 8, 1, processes=True),
        "loss": LossCase(device, wide_type(dtype), 32_000),
        "norm": NormCase(device, dtype, width),
    }
    others = offers()
    for kind, table in TABLES.items():
        if kind != "products":
            yield FoundProvider(kind, TORCH, OWN, "")
        owners = dict.fromkeys(table, OWN) | {offer.name: offer.package for offer in others if offer.kind == kind}
        for name, package in owners.items():
            yield FoundProvider(kind, name, package, _refusal(table, name, cases[kind]))
    for offer in others:
        if not offer.kind:
            yield FoundProvider("", offer.name, offer.package, offer.fault)


def _refusal(table: ProviderTable[Any], name: str, case: Any) -> str:
    """Why a provider cannot serve a case; empty where it can. A package's fault is a reason, and ends nothing."""
    try:
        reason: str = table.named(name).why_not(case)
    except RuntimeFault as error:
        return error.message
    except Exception as error:
        return f"`why_not` fails: {type(error).__name__}: {error}"
    return reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the list, and return the exit status: 0, also where providers are refused."""
    parser = argparse.ArgumentParser(prog="schedc providers")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "float64"))
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args(arguments)
    device = gpu.current_device() or torch.device("cpu")
    rows = list(found(device, getattr(torch, options.dtype), options.width))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    print(f"layers of width {options.width} in {options.dtype} on {device.type}")
    for row in rows:
        cells = [clean(cell).ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, f"refused: {clean(row.refused)}" if row.refused else "serves"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
