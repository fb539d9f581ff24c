"""Names the command that measures a constant of the cost model."""

from __future__ import annotations

from collections.abc import Mapping

_CALIBRATE = "schedc calibrate PLAN.sched"

MEASURED_BY: Mapping[str, str] = {
    **dict.fromkeys(("grouped", "grouped_r0", "expert_launch"), f"{_CALIBRATE} --only experts"),
    **dict.fromkeys(("ep", "ep_alpha", "ep_peer", "p2p", "crowd"), f"{_CALIBRATE} --only exchange"),
    **dict.fromkeys(("tp", "tp_alpha", "tp_nodes"), "python benchmarks/collectives.py"),
    "dp": f"{_CALIBRATE} --only sums",
    "launch": f"{_CALIBRATE} --only launch",
    "loads": "Pipeline.record_routing",
    **dict.fromkeys(("gemm", "gemm_k0", "attention", "hbm", "moe_launch"), _CALIBRATE),
}
"""The rows of a calibration enter the fit. The benchmark prints shares of a link, which a fit file may be given.
So may it `crowd`: how much longer an exchange takes on twice the domains, which no fit estimates.

A constant without a command is known by whole measured steps alone.
"""

STEPS = "schedc fit"
"""What measured steps enter."""


def measured_by(name: str) -> str:
    """The command that measures a constant, or that takes measured steps."""
    return MEASURED_BY.get(name, STEPS)
