"""A compiler of pipeline-parallel training schedules: ``schedc.compile("dualpipev", P=4, M=16)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedc.ir import plan_text

if TYPE_CHECKING:
    from schedc.compiler import Analysis, analyse, compile
    from schedc.diagnostics import CompilerBug, Diagnostic, DiagnosticError
    from schedc.drawn import DrawnSchedule, draw
    from schedc.ir.program import Program
    from schedc.load.library import library
    from schedc.step.costs.costs import Costs

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "CompilerBug",
    "Costs",
    "Diagnostic",
    "DiagnosticError",
    "DrawnSchedule",
    "Program",
    "analyse",
    "compile",
    "draw",
    "library",
]

_HOME = {
    "Analysis": "schedc.compiler",
    "analyse": "schedc.compiler",
    "compile": "schedc.compiler",
    "Costs": "schedc.step.costs.costs",
    "CompilerBug": "schedc.diagnostics",
    "Diagnostic": "schedc.diagnostics",
    "DiagnosticError": "schedc.diagnostics",
    "DrawnSchedule": "schedc.drawn",
    "draw": "schedc.drawn",
    "Program": "schedc.ir.program",
    "library": "schedc.load.library",
}


def _language() -> plan_text.PlanLanguage:
    from schedc.plan import writer

    return writer


plan_text.speak(_language)


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that ``schedc --help`` loads only modules that it needs."""
    if name not in _HOME:
        raise AttributeError(f"module 'schedc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
