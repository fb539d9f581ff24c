"""A value that a forward reads between units, while the forward is recorded: where it is read, and where it is set."""

from __future__ import annotations

import warnings
from types import CodeType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.frozen import MISSING, PLAIN, Contents, contents, frozen, same_value
from schedc_runtime.partition.reads import Read
from schedc_runtime.partition.structure import tensors_in

_LENT = ("_parameters", "_buffers", "_modules")
Place = tuple[CodeType, int]
"""Code, and the number of a line."""


class Noted:
    """A read. places: those that read it. updates: those that set it later, each with its line for errors."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.places: set[Place] = set()
        self.updates: dict[Place, str] = {}
        self._beside_fakes = True
        self._value = read.now()
        self._first = frozen(self._value)
        self._inside = contents(self._value) if type(self._value) in (dict, list) else None

    def counts(self, model: nn.Module) -> bool:
        """Whether a recording depends on the value. One that is only counted up or replaced does not.

        Raises `PartitionError` for a value that each forward makes of its own last value, and uses.
        """
        self._beside_fakes = _keeps_fakes(self.read.holder)
        now = frozen(self.read.now())
        if same_value(self._first, now):
            return True
        if not self.updates:
            self._warn_of_contents(model, now)
            return True
        others = self.places - self.updates.keys()
        own = [line for place, line in self.updates.items() if place in self.places]
        if own and others:
            raise PartitionError(
                f"{type(model).__name__} reads `{self.read.name}` between its units, and each forward changes it: a"
                f" step runs this code once for all microbatches, or not at all{own[0]}",
                "count in the training loop, and give the number with the batch or set it before the step; or count"
                " inside of a unit",
            )
        return bool(others)

    def put_back(self) -> None:
        """Put back what the forward keeps for a later one, such as a table and the length that it was made for.

        A mark of what was prepared once stays, as what was prepared does: hooks of submodules are.
        """
        holder, key = self.read.holder, self.read.key
        if self._beside_fakes and self.updates and self.places - self.updates.keys():
            if not self.read.table:
                setattr(holder, key, self._value)
            elif self._value is MISSING:
                holder.pop(key, None)
            else:
                holder[key] = self._value
        elif self._inside is not None and any(isinstance(part, FakeTensor) for part in tensors_in(self._value)):
            keys, values = self._inside
            self._value.clear()
            if isinstance(self._value, dict):
                self._value.update(zip(keys, values, strict=True))
            else:
                self._value.extend(values)

    def _warn_of_contents(self, model: nn.Module, now: Any) -> None:
        if not isinstance(now, Contents) or not isinstance(self._first, Contents):
            return
        pairs = zip(self._first.values, now.values, strict=False)
        if any(isinstance(before, PLAIN) and not same_value(before, after) for before, after in pairs):
            warnings.warn(
                f"{type(model).__name__} changes what is in `{self.read.name}` between its units, and reads it. This is"
                " Python, which a pipeline records and does not run again: count in the training loop, or in a unit",
                stacklevel=2,
            )


def _keeps_fakes(holder: Any) -> bool:
    """Whether an object keeps a fake tensor that is no parameter or buffer."""
    table = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    own = [value for key, value in table.items() if key not in _LENT]
    return any(isinstance(tensor, FakeTensor) for tensor in tensors_in(own))
