"""The levels of both packages, bottom first: a file imports only from its own room and from levels before it."""

from __future__ import annotations

from itertools import chain

LEVELS = {
    "schedc": (
        ("source", "interrupts", "units"),
        ("diagnostics", "codes"),
        ("fixes",),
        ("model",),
        ("ir",),
        ("syntax", "cell"),
        ("step",),
        ("elaborate",),
        ("exact",),
        ("claims",),
        ("formulas", "search", "load", "inference"),
        ("plan", "drawing"),
        ("interchange",),
        ("inputs",),
        ("compiler",),
        ("frontier",),
        ("planner",),
        ("diagnose",),
        ("report", "schemas"),
        ("drawn",),
        ("editor",),
        ("cli",),
        ("__main__",),
    ),
    "schedc_runtime": (
        ("errors", "written_code"),
        ("device", "saved", "providers", "triton_kernels"),
        ("kernels", "capture"),
        ("testing", "transport"),
        ("random_numbers", "pool_server"),
        ("ranks", "partition", "checkpoint", "offload"),
        ("recompute", "materialize", "row_flow", "data"),
        ("segments",),
        ("layer_levels",),
        ("stage",),
        ("moe", "head_loss", "compiled", "fusion", "tensor_parallel"),
        ("transit", "loss_providers"),
        ("models",),
        ("execute",),
        ("blame",),
        ("data_parallel", "keeper", "speed", "migration", "telemetry"),
        ("pipeline",),
        ("audit",),
        ("parity", "measure", "trainers"),
        ("commands",),
    ),
}
"""By package. A room is a folder or a file on the package's own level; rooms of one level do not import each other."""

ROOMS = {package: tuple(chain.from_iterable(levels)) for package, levels in LEVELS.items()}
"""The rooms in order, without the package's own ``__init__``. docs/architecture.md has the same order."""
