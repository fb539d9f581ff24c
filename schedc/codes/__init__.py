"""Explains every diagnostic code, for `schedc explain`; one table per family of codes."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode
from schedc.codes.s0_syntax import S0
from schedc.codes.s1_names import S1
from schedc.codes.s1_plans import S1_PLANS
from schedc.codes.s2_order import S2
from schedc.codes.s3_communication import S3
from schedc.codes.s4_memory import S4
from schedc.codes.s5_claims import S5
from schedc.codes.s6_export import S6
from schedc.codes.s7_fits import S7_FITS
from schedc.codes.s7_outputs import S7_OUTPUTS
from schedc.codes.s7_planner import S7

FAMILIES: dict[str, str] = {
    "S0": "syntax",
    "S1": "names and sizes",
    "S2": "order and completeness",
    "S3": "communication and deadlock",
    "S4": "memory and costs",
    "S5": "claims (`expect`)",
    "S6": "what an export target cannot express",
    "S7": "models, clusters and measured steps",
}

ENTRIES: tuple[DiagnosticCode, ...] = (*S0, *S1, *S1_PLANS, *S2, *S3, *S4, *S5, *S6, *S7, *S7_FITS, *S7_OUTPUTS)
CODES: dict[str, DiagnosticCode] = {code.code: code for code in ENTRIES}
