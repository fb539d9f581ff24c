"""What the forward reads of Python between units, and whether that has changed before a step.

    a recording   notes attributes, globals and closures that it reads, with their values (`read_notes`)
    before a step values are compared, first by identity, then by value; other values are another variant of the model
    ranks         compare what has changed, so that all of them record anew, or none

A recording holds for one variant. When earlier values return, the model's earlier recordings are used again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from operator import is_
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.frozen import (
    MISSING,
    PLAIN,
    Contents,
    Shallow,
    contents,
    frozen,
    same_value,
    shallow,
    shown_value,
)
from schedc_runtime.partition.structure import tensors_in

_VARIANTS = 8
"""Variants that are kept."""
_LONGEST = 120
"""Characters of a value in an error."""
_UNCHANGED = "as it was recorded"
_OFTEN = 4
"""After so many new variants there is a warning."""


@dataclass(frozen=True, eq=False)
class Read:
    """Something that was read: an item of a dict, or an attribute of an object.

    name: what errors call it. table: whether ``holder`` is a dict. line: of the model's code that reads a value which
    cannot be compared; "" for other values.
    """

    name: str
    holder: Any
    key: str
    table: bool
    line: str = ""

    @property
    def identity(self) -> tuple[int, str, bool]:
        return id(self.holder), self.key, self.table

    def now(self) -> Any:
        """The value; `MISSING` if there is none."""
        if self.table:
            return dict.get(self.holder, self.key, MISSING)
        try:
            return getattr(self.holder, self.key, MISSING)
        except ValueError:  # an empty cell of a closure
            return MISSING


class Reads:
    """All that the recordings of a model have read. through: the modules that are recorded through, by path.

    variant: number of the values that are there now. digest: of what has changed since it was first read, equal on two
    ranks with the same changes; "" for no change.
    """

    def __init__(self, model: nn.Module, through: Mapping[str, nn.Module]) -> None:
        self.model = model
        self._through = dict(through)
        self.variant, self.digest = 0, ""
        self._reads: dict[tuple[int, str, bool], Read] = {}
        self._first: list[Any] = []
        self._now: list[Any] = []
        self._variants: dict[int, list[Any]] = {0: []}
        self._count = 0
        self._settle([])

    def add(self, reads: Iterable[Read]) -> None:
        """Note the reads of a recording, after the recording."""
        new = [read for read in reads if read.identity not in self._reads]
        for read in new:
            if read.line:
                warnings.warn(
                    f"{type(self.model).__name__} reads `{read.name}` between its units, a"
                    f" {type(read.now()).__name__}, in which a pipeline does not see a change{read.line}\n"
                    "read a number, a string, a tensor or a plain object in its place, or read it inside of a unit",
                    stacklevel=2,
                )
            self._reads[read.identity] = read
        self._settle([frozen(read.now()) for read in self._reads.values()])
        self._first += self._now[len(self._first) :]
        self._variants[self.variant] = list(self._now)

    def accept(self) -> None:
        """Take the values that differ from those of the last `refresh` for the same: the pipeline has changed them."""
        before, now = self._now, [frozen(read.now()) for read in self._reads.values()]
        self._first = [
            new if same_value(first, old) else first for first, old, new in zip(self._first, before, now, strict=True)
        ]
        self._settle(now)
        self._variants[self.variant] = list(now)

    def refresh(self) -> None:
        """Compare with what was there before, and find the variant. It runs before every step."""
        if self._unchanged():
            return
        before = self._now
        self._settle([frozen(read.now()) for read in self._reads.values()])
        changed = [
            read
            for read, old, new in zip(self._reads.values(), before, self._now, strict=True)
            if not same_value(old, new)
        ]  # fmt: skip
        if changed:
            self._choose(changed)
            facts = [fact for fact in sorted(self.facts().items()) if fact[1] != _UNCHANGED]
            self.digest = blake2b(repr(facts).encode(), digest_size=8).hexdigest() if facts else ""

    def key(self, training: bool) -> str:
        """What a recording depends on, as of the last `refresh`. training: the mode around units."""
        return f"{self.variant}{self._own_modes(training)}"

    def state(self, training: bool) -> str:
        """What must be equal on all ranks, as of the last `refresh`."""
        return f"{self.digest}{self._own_modes(training)}"

    def facts(self) -> dict[str, str]:
        """By name: what is there in place of what was read first."""
        facts: dict[str, str] = {}
        for read, first, now in zip(self._reads.values(), self._first, self._now, strict=True):
            if isinstance(now, Contents) and _of_library(read.name):
                continue  # a registry, to which one rank alone may add
            if same_value(first, now):
                facts.setdefault(read.name, _UNCHANGED)
            else:
                facts[read.name] = _short(shown_value(now))
        return facts

    def modes(self) -> dict[str, bool]:
        """Whether each module that is recorded through is in training mode."""
        return {path: module.training for path, module in self._through.items()}

    def _own_modes(self, training: bool) -> str:
        """Modes of parts; "" where all are in the mode around units, as all are while this is not the model's."""
        if self.model.training is not training:
            return ""
        modes = [module.training for module in self._through.values()]
        return "" if modes.count(training) == len(modes) else f" {modes}"

    def _choose(self, changed: Sequence[Read]) -> None:
        """Choose the variant of the current values: an earlier variant, or a new number."""
        for known_number, known in reversed(self._variants.items()):
            if all(map(same_value, known, self._now)):
                number = known_number
                break
        else:
            number = self._count = self._count + 1
            if number == _OFTEN:
                self._warn_often(changed[0])
        self.variant = number
        self._variants.pop(number, None)
        self._variants[number] = list(self._now)
        while len(self._variants) > _VARIANTS:
            del self._variants[next(iter(self._variants))]

    def _warn_often(self, read: Read) -> None:
        warnings.warn(
            f"what {type(self.model).__name__} reads between its units has changed {_OFTEN} times, `{read.name}` the"
            " last time. The model is recorded anew each time. Keep such a value in a buffer (register_buffer), and"
            " write into the buffer; or read it inside of a unit",
            stacklevel=2,
        )

    def _settle(self, now: list[Any]) -> None:
        """Take the values that are there, to compare with them by identity. now: the same, frozen."""
        self._now = now
        reads = [(read, read.now()) for read in self._reads.values()]
        tables = [(read.holder, read.key, value) for read, value in reads if read.table]
        attributes = [(read.holder, read.key, value) for read, value in reads if not read.table]
        self._tables, self._attributes = _columns(tables), _columns(attributes)
        inner = {id(part): part for _, value in reads for part in shallow(value)}
        shallows = {id(part.container): part for part in inner.values() if isinstance(part, Shallow)}
        self._empty = [part.container for part in shallows.values() if not part.values and _has_length(part.container)]
        self._full = [part for part in shallows.values() if part.values or not _has_length(part.container)]
        self._tensors = [(part, part.dtype) for part in inner.values() if isinstance(part, Tensor)]
        self._others = [(part, frozen(part)) for part in inner.values() if isinstance(part, (set, np.ndarray))]

    def _unchanged(self) -> bool:
        """Whether everything is the same object as before."""
        try:
            return (
                all(map(is_, map(dict.get, *self._tables[:2], repeat(MISSING)), self._tables[2]))
                and all(map(is_, map(getattr, *self._attributes[:2], repeat(MISSING)), self._attributes[2]))
                and not any(self._empty)
                and all(map(Shallow.holds, self._full))
                and all(tensor.dtype is dtype for tensor, dtype in self._tensors)
                and all(same_value(before, frozen(part)) for part, before in self._others)
            )
        except ValueError:  # an empty cell of a closure
            return False


def _columns(rows: Sequence[tuple[Any, str, Any]]) -> tuple[list[Any], list[str], list[Any]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _short(text: str) -> str:
    """A text that fits into an error, and still tells two long ones apart."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... (digest {blake2b(text.encode(), digest_size=4).hexdigest()})"


def _of_library(name: str) -> bool:
    """Whether a name begins with that of an installed package."""
    module = sys.modules.get(name.partition(".")[0])
    return "site-packages" in (getattr(module, "__file__", None) or "")


def _has_length(container: Any) -> bool:
    return hasattr(container, "__len__")


_LENT = ("_parameters", "_buffers", "_modules")
Place = tuple[CodeType, int]
"""Code, and the number of a line."""


class Noted:
    """A read. places: code that reads the value. updates: code that sets the value later, with lines for errors."""

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
        self._beside_fakes = bool(self.updates) and _keeps_fakes(self.read.holder)
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
                f"{type(model).__name__} changes what is in `{self.read.name}` between its units, and reads the"
                " changed values. A pipeline records Python once: count in the training loop, or in a unit",
                stacklevel=2,
            )


def _keeps_fakes(holder: Any) -> bool:
    """Whether an object keeps a fake tensor that is no parameter or buffer."""
    table = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    own = [value for key, value in table.items() if key not in _LENT]
    return any(isinstance(tensor, FakeTensor) for tensor in tensors_in(own))
