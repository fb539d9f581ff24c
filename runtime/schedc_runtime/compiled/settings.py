"""The settings of compiled units: what `Pipeline` takes as ``compile=``, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import RuntimeFault

CUT = ("inductor", "aot_eager")
"""Backends whose backward graphs are cut for I and W."""
_SPLIT = (*CUT, "eager")
"""Backends that leave weight gradients to W. That of ``eager`` is autograd's own backward."""


@dataclass(frozen=True)
class CompileSettings:
    """How units are compiled, in the words of `torch.compile`.

    fullgraph: raise an error for a unit that is no single graph; by default it then runs without compilation.
    options: settings of inductor.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def waits(self) -> bool:
        """Whether weight gradients of compiled units wait for W."""
        return self.backend in _SPLIT

    def patches(self) -> dict[str, Any]:
        """The settings of inductor for ``mode`` and ``options``."""
        if self.mode in (None, "default"):
            return dict(self.options)
        from torch._inductor import list_mode_options

        return {**list_mode_options(self.mode, self.dynamic), **dict(self.options)}


def compile_settings(given: bool | Mapping[str, Any] | None) -> CompileSettings | None:
    """The settings of ``compile=``: True, a dict of `torch.compile`'s keywords, or None; checked.

    Raises `RuntimeFault`.
    """
    if given is None or given is False:
        return None
    if given is True:
        return CompileSettings()
    fields = CompileSettings.__dataclass_fields__
    if not isinstance(given, Mapping):
        raise RuntimeFault(f"compile={given!r} says nothing", 'True, or a dict such as {"mode": "default"}')
    if unknown := [key for key in given if key not in fields]:
        raise RuntimeFault(
            f"compile= has the keys {unknown}, which are not of torch.compile", f"one of {', '.join(fields)}"
        )
    settings = CompileSettings(**{**given, "options": tuple(sorted((given.get("options") or {}).items()))})
    _check(settings)
    return settings


def _check(settings: CompileSettings) -> None:
    modes: Mapping[str, Any] = {}
    if settings.mode is not None or settings.options:
        if settings.backend != "inductor":
            raise RuntimeFault(
                f"compile= has a mode or options, which the backend {settings.backend!r} does not take",
                'leave them out, or take the backend "inductor"',
            )
        from torch._inductor import list_mode_options, list_options

        modes = list_mode_options()
        if settings.mode not in (None, "default", *modes):
            raise RuntimeFault(f"compile= has the mode {settings.mode!r}", f"one of {', '.join(modes)}")
        if wrong := sorted({key for key, _ in settings.options} - set(list_options())):
            raise RuntimeFault(f"compile= has options that inductor does not have: {wrong}", "see its list_options()")
    if settings.backend == gpu.GRAPH_BACKEND or settings.patches().get(gpu.GRAPH_OPTION):
        raise RuntimeFault(
            "compile= asks for CUDA graphs, which reuse their memory at the next call: a pipeline has several"
            " microbatches in flight",
            'leave the mode out, or take "max-autotune-no-cudagraphs"',
        )
