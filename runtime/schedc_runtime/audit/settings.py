"""The settings of an audit, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass

from schedc_runtime.errors import RuntimeFault


@dataclass(frozen=True)
class AuditSettings:
    """How microbatches are repeated. `Audit` has the rest."""

    every: int = 1
    folder: str | os.PathLike[str] = "audit"
    on_fault: str = "stop"

    def __post_init__(self) -> None:
        if self.every < 1 or self.on_fault not in ("stop", "tell"):
            raise RuntimeFault(
                f"Audit(every={self.every}, on_fault={self.on_fault!r})",
                'every is at least 1, and on_fault is "stop" or "tell"',
            )
