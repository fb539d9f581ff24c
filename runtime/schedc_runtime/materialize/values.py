"""Decides where the values of each name come from: a checkpoint, the user's rule, or the model's own construction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime.checkpoint.stored import Stored, read_box
from schedc_runtime.errors import MaterializeError
from schedc_runtime.materialize.construction import Construction, Origin
from schedc_runtime.materialize.record import written
from schedc_runtime.materialize.replay import Seeds, make, seed_of, seeds_by_name
from schedc_runtime.random_numbers.session import default_generator

Rule = Callable[[str, Tensor], Any]
"""init(name, tensor) writes ``tensor`` [...] or returns its values. Else the model's own rule holds."""


class OwnPart(NamedTuple):
    """Which part of a whole tensor is here. dim: the dimension that is cut. first: the first index along it."""

    dim: int = 0
    first: int = 0


WHOLE = OwnPart()


@dataclass
class Values:
    """The values of all names of a model.

    stored: the checkpoint's tensors under the model's names; None without a checkpoint. rule: for parameters, and for
    whatever else has no values.
    """

    construction: Construction = field(default_factory=Construction)
    seed: int = 0
    stored: Mapping[str, Stored] | None = None
    rule: Rule | None = None
    _seeds: dict[int, Seeds] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        named: dict[int, list[tuple[str, Origin]]] = {}
        for name, origin in self.construction.names.items():
            named.setdefault(id(origin.tape), []).append((name, origin))
        for group in named.values():
            if (tape := group[0][1].tape) is not None:
                views = [(name, origin.view) for name, origin in group if origin.view is not None]
                self._seeds[id(tape)] = seeds_by_name(tape, views, self.seed)

    def check(self) -> None:
        """Raise `MaterializeError` for names without values, and for stored tensors of other shapes."""
        if self.stored is not None:
            self._check_stored(self.stored)
        lost = [name for name in self.construction.unfilled() if self.stored_as(name) is None]
        if lost and self.rule is None:
            origin = self.construction.names[lost[0]]
            why = f": {origin.error}" if origin.error else ""
            raise MaterializeError(
                f"nobody fills the {_WORDS[origin.kind]} `{lost[0]}`{why}{_and_more(lost)}",
                "construct and convert the model inside `with schedc_runtime.deferred():`, give the module a"
                " `reset_parameters()`, or give the values by `pipe.materialize(init=...)`",
            )

    def stored_as(self, name: str) -> Stored | None:
        """The stored tensor of ``name`` or of a name tied to it; None if the checkpoint lacks both."""
        if self.stored is None or self.construction.names[name].kind not in ("parameter", "buffer"):
            return None
        return next((self.stored[tied] for tied in self.construction.ties[name] if tied in self.stored), None)

    def make(self, name: str, like: Tensor, device: torch.device, part: OwnPart = WHOLE) -> Tensor:
        """The values of ``name`` on ``device``, with the shape and strides of ``like`` [...].

        part: which part of the whole tensor ``like`` is.
        """
        origin = self.construction.names[name]
        if (stored := self.stored_as(name)) is not None:
            target = _empty_like(like, device)
            self.read(name, stored, target, part)
            return target
        if origin.kind == "parameter" and (made := self._by_rule(name, origin, device)) is not None:
            return _taken(made, like, part)
        if origin.filled and origin.tape is not None and origin.view is not None:
            return _taken(make(origin.tape, origin.view, device, self._seeds[id(origin.tape)]), like, part)
        if (made := self._by_rule(name, origin, device)) is None:
            raise MaterializeError(
                f"`init` leaves `{name}` as it is, and the model gives it no values", "fill it there"
            )
        return _taken(made, like, part)

    def read(self, name: str, stored: Stored, target: Tensor, part: OwnPart) -> None:
        """Fill ``target`` [...], a part of the stored tensor of ``name``."""
        offset = [part.first if dim == part.dim else 0 for dim in range(target.dim())]
        read_box(target, offset, self.construction.names[name].size, stored)

    def _by_rule(self, name: str, origin: Origin, device: torch.device) -> Tensor | None:
        """What the user's rule gives; None without a rule, or if it leaves the tensor alone."""
        if self.rule is None:
            return None
        tensor = torch.empty(origin.size, dtype=origin.dtype, device=device)
        default_generator(device).manual_seed(seed_of(self.seed, f"{self.construction.ties[name][0]}/init"))
        with torch.no_grad(), _Watch() as watch:
            result = self.rule(name, tensor)
        if tensor.untyped_storage()._cdata in watch.storages:
            return tensor
        if isinstance(result, Tensor) and result is not tensor:
            return tensor.copy_(result.detach())
        return None

    def _check_stored(self, stored: Mapping[str, Stored]) -> None:
        missing = [n for n, x in self.construction.names.items() if x.kind in _STORED and self.stored_as(n) is None]
        if missing and self.rule is None:
            raise MaterializeError(
                f"the checkpoint lacks `{missing[0]}`{_and_more(missing)}{_near(missing[0], stored)}",
                "give a checkpoint of this model, or the values of such names by `init=`",
            )
        for name, origin in self.construction.names.items():
            if (entry := self.stored_as(name)) is not None and tuple(entry.shape) != origin.size:
                raise MaterializeError(
                    f"`{name}` is {list(entry.shape)} in the checkpoint and {list(origin.size)} in the model",
                    "build the model with the sizes of the checkpoint",
                )


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that are written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.storages.update(tensor.untyped_storage()._cdata for tensor in written(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


_STORED = ("parameter", "buffer")
_WORDS = {"parameter": "parameter", "buffer": "buffer", "scratch": "buffer", "attribute": "tensor"}


def _empty_like(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _taken(whole: Tensor, like: Tensor, part: OwnPart) -> Tensor:
    """The part of ``whole`` [...] that ``like`` [...] has, without memory for the rest."""
    own = whole if whole.shape == like.shape else whole.narrow(part.dim, part.first, like.shape[part.dim])
    if own.stride() == like.stride() and own.untyped_storage().nbytes() == own.numel() * own.dtype.itemsize:
        return own
    return _empty_like(like, own.device).copy_(own)


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _near(name: str, stored: Mapping[str, Stored]) -> str:
    """What the checkpoint has in place of ``name``: names below the nearest module that has some."""
    for prefix in _prefixes(name):
        if names := [each for each in stored if each.startswith(prefix)]:
            fused = "; a fused form without mapping?" if len(names) > 1 else ""
            return f"; below `{prefix}` it has `{names[0]}`{_and_more(names)}{fused}"
    return ""


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:depth]) + "." for depth in range(len(parts) - 1, 0, -1))
