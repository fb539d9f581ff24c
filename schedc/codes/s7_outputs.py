"""Explains the codes of family S7 about folders of plans, which searches write and comparisons read."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode

S7_OUTPUTS: tuple[DiagnosticCode, ...] = (
    DiagnosticCode(
        "S750",
        "a folder that is not written over",
        "`schedc plan ... -o FOLDER` writes a folder whole or not at all. A folder that holds plans is written over "
        "only with `--force`. A folder that holds anything else is never written over, because its files would go. "
        "Raised before the search begins.",
    ),
    DiagnosticCode(
        "S751",
        "a plan file without its waterfall",
        "`schedc plan compare A.sched B.sched` reads the waterfalls from the `plans.json` that lies beside each "
        "plan file, as `schedc plan ... -o FOLDER` wrote them. A file that was moved away from it, or that no search "
        "wrote, has none. A plan that was edited since has another step than its waterfall, and is refused too.",
    ),
)
