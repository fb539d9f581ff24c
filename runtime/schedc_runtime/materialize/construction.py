"""What a model on the meta device is made of: every name with its recorded tensor, fixed before stages change it.

A model made under plain ``torch.device("meta")`` has its modules' initialisation recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedc_runtime.materialize.record import DEFERRED, recording
from schedc_runtime.materialize.replay import filled
from schedc_runtime.materialize.tape import TAPES, Tape, View, forget_dead, tape_of
from schedc_runtime.partition.structure import path_of


class Named(NamedTuple):
    """A tensor [...] of a module by its qualified name. kind: parameter, buffer, scratch or attribute.

    A scratch buffer is one outside of the state dict. An attribute is a tensor that is registered nowhere.
    """

    name: str
    tensor: Tensor
    kind: str

    @property
    def stored(self) -> bool:
        """Whether the tensor belongs to the state dict."""
        return self.kind in ("parameter", "buffer")


@dataclass(frozen=True)
class Origin:
    """Where the values of a name come from.

    size, dtype: shape and type of the whole tensor. view: the tensor on ``tape``; None for one that was real when the
    pipeline was built. filled: whether anything gives it values. error: what the module's own function raised.
    """

    kind: str
    size: tuple[int, ...]
    dtype: torch.dtype
    tape: Tape | None = None
    view: View | None = None
    filled: bool = True
    error: str = ""


@dataclass(frozen=True)
class Construction:
    """names: the tensors of a model, in its order. ties: for each name the names of the same tensor.

    device: where the tensors shall be; None if the construction does not say.
    """

    names: dict[str, Origin] = field(default_factory=dict)
    ties: dict[str, tuple[str, ...]] = field(default_factory=dict)
    device: torch.device | None = None

    @property
    def deferred(self) -> bool:
        """Whether some tensor was on the meta device."""
        return any(origin.view is not None for origin in self.names.values())

    def unfilled(self) -> list[str]:
        """Names that nothing gives values."""
        return [name for name, origin in self.names.items() if not origin.filled]


def construction_of(model: nn.Module) -> Construction:
    """The construction of ``model``, whose tensors may be real, on the meta device, or both.

    Modules made under plain ``torch.device("meta")`` have no recording. Their own functions, such as
    ``reset_parameters``, are recorded now.
    """
    forget_dead()
    tensors = list(named_tensors(model))
    meta = [each.tensor for each in tensors if each.tensor.is_meta]
    plain = meta and not any(module in DEFERRED for module in model.modules())
    errors = _record_plain(model, meta) if plain else {}
    names: dict[str, Origin] = {}
    same: dict[Tensor, list[str]] = {}
    for each in tensors:
        names[each.name] = _origin(each, errors.get(each.name.rpartition(".")[0], ""))
        same.setdefault(each.tensor, []).append(each.name)
    ties = {name: tuple(group) for group in same.values() for name in group}
    devices = [origin.tape.device for origin in names.values() if origin.tape is not None]
    return Construction(names, ties, next((device for device in devices if device is not None), None))


def _record_plain(model: nn.Module, tensors: list[Tensor]) -> dict[str, str]:
    tape = Tape()
    for tensor in tensors:
        tape.adopt(tensor)
    TAPES.append(tape)
    return record_inits(model, tape)


def _origin(each: Named, error: str) -> Origin:
    size = tuple(each.tensor.shape)
    if not each.tensor.is_meta:
        return Origin(each.kind, size, each.tensor.dtype)
    tape = tape_of(each.tensor) or Tape()
    view = tape.adopt(each.tensor)
    return Origin(each.kind, size, each.tensor.dtype, tape, view, filled(tape, view), error)


def named_tensors(module: nn.Module) -> Iterator[Named]:
    """All tensors of a module by name: parameters first, then buffers, then plain attributes; ties under each name."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield Named(name, parameter, "parameter")
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                kind = "scratch" if name in owner._non_persistent_buffers_set else "buffer"
                yield Named(path_of(prefix, name), buffer, kind)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, value in vars(owner).items():
            if isinstance(value, Tensor):
                yield Named(path_of(prefix, name), value, "attribute")


_OWN = ("reset_parameters", "_reset_parameters", "init_weights", "initialize_weights")
"""Methods by which modules initialise themselves, of which the first that a module has is called."""


def record_inits(model: nn.Module, tape: Tape) -> dict[str, str]:
    """Record the initialisation of every module of ``model``, children first, and return what failed by module name.

    A Hugging Face model initialises all its modules itself.
    """
    errors: dict[str, str] = {}
    with recording(tape):
        for name, function in _functions(model, ""):
            try:
                function()
            except Exception as error:  # tensors of this function are refused, with the error as reason
                errors[name] = f"{type(error).__name__}: {error}"
    return errors


def _functions(module: Any, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    if callable(getattr(module, "_init_weights", None)) and callable(getattr(module, "initialize_weights", None)):
        yield name, module.initialize_weights
        return
    for child_name, child in module.named_children():
        yield from _functions(child, path_of(name, child_name))
    own = (getattr(module, method, None) for method in _OWN)
    function = next((method for method in own if callable(method) and not _needs_arguments(method)), None)
    if function is not None:
        yield name, function


def _needs_arguments(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
