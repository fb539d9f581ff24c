"""Compiles the units of stages, each as one graph, and gives them back as they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from schedc_runtime.compiled.settings import CUT, CompileSettings
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.exchange import Exchange

_GRAPHS = 8
"""Graphs of one unit: for training, evaluation, and shapes that change."""


class CompiledUnits:
    """The units that are compiled, and what each was called by before."""

    def __init__(
        self,
        settings: CompileSettings,
        units: Mapping[str, Iterable[nn.Module]],
        backend: Callable[..., Any] | None = None,
        opened: Collection[str] = (),
    ) -> None:
        """units: by name the copies of a unit that are here. Each is compiled when it is called first.

        backend: in place of `backend_of` the settings. opened: names of units in whose middle stages exchange.
        """
        self._before: list[tuple[nn.Module, Any]] = []
        eager = [name for name, copies in units.items() if name in opened or any(map(_exchanges, copies))]
        compiled = {name: list(copies) for name, copies in units.items() if name not in eager}
        for name, copies in compiled.items():
            _refuse_wrapped(name, copies)
        self._warn(settings, eager)
        limit = _GRAPHS * (1 + sum(map(len, compiled.values())))
        options = {"backend": backend or backend_of(settings), "dynamic": settings.dynamic, "recompile_limit": limit}
        compiler: Any = torch.compile
        for name, copies in compiled.items():
            for unit in copies:
                self._before.append((unit, unit._compiled_call_impl))
                call = compiler(_call_of(unit), fullgraph=True, **options)
                unit._compiled_call_impl = CompiledCall(self, name, unit, call, settings.fullgraph)

    def release(self) -> None:
        """Give the units back as they were."""
        for unit, before in self._before:
            unit._compiled_call_impl = before
        self._before = []

    def failed(self, name: str, unit: nn.Module, error: Exception) -> None:
        """Leave a unit that cannot be compiled, and all units made of the same modules, to themselves; warn once."""
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        alike = [part for part, _ in self._before if _modules(part) == _modules(unit)]
        for part in alike:
            part._compiled_call_impl = None
        warnings.warn(
            f"`{name}` ({type(unit).__name__}) is no single graph: it and {len(alike) - 1} units of the same modules"
            f" run without torch.compile: {reason}; compile={{'fullgraph': True}} raises the whole error",
            stacklevel=2,
        )

    @staticmethod
    def _warn(settings: CompileSettings, eager: list[str]) -> None:
        if eager:
            warnings.warn(
                f"units with exchanges between ranks run without torch.compile: {', '.join(eager)}", stacklevel=2
            )
        if not settings.waits:
            warnings.warn(
                f"the backend {settings.backend!r} of torch.compile makes one backward for I and W: weight gradients of"
                f" compiled units are computed in I; those of {' and '.join(CUT)} wait for W",
                stacklevel=2,
            )


class CompiledCall:
    """Calls a unit's compiled code; from the first failure of the compiler on, the unit itself."""

    def __init__(
        self, units: CompiledUnits, name: str, unit: nn.Module, call: Callable[..., Any], fullgraph: bool
    ) -> None:
        self.units, self.name, self.unit, self.call, self.fullgraph = units, name, unit, call, fullgraph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.call(*args, **kwargs)
        except Exception as error:
            if self.fullgraph or not _is_of_compiler(error):
                raise
            self.units.failed(self.name, self.unit, error)
        return self.unit._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _call_of(unit: nn.Module) -> Callable[..., Any]:
    """What is compiled: torch skips the forwards of its own modules, unless code of others calls them."""
    if not type(unit).__module__.startswith("torch."):
        return unit._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return unit._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call


def _is_of_compiler(error: Exception) -> bool:
    """Whether a unit cannot be made one graph: nothing of it has run."""
    from torch._dynamo import exc

    return "found no compiled frames" in str(error) or isinstance(
        error, (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError, exc.FailOnRecompileLimitHit)
    )


@cache
def backend_of(settings: CompileSettings) -> str | Callable[..., Any]:
    """The backend, the same object each time: Dynamo keeps graphs by backend."""
    from schedc_runtime.compiled.backends import cut_aot_eager, cut_inductor

    if settings.backend == "inductor":
        return partial(cut_inductor, patches=settings.patches())
    return cut_aot_eager if settings.backend == "aot_eager" else settings.backend


def _modules(unit: nn.Module) -> list[type]:
    """The classes of a unit's modules, which decide whether it is one graph."""
    return [type(part) for part in unit.modules()]


def _exchanges(unit: nn.Module) -> bool:
    return any(isinstance(part, Exchange) for part in unit.modules())


def _refuse_wrapped(name: str, copies: Iterable[nn.Module]) -> None:
    for unit in copies:
        for path, part in unit.named_modules():
            if type(part).__name__ == "OptimizedModule":
                raise RuntimeFault(
                    f"`{'.'.join(filter(None, (name, path)))}` is the result of torch.compile(module) already",
                    "give the pipeline the module itself, and compile= compiles it",
                )
