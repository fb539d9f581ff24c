"""Follows the rows of a batch through every operator that a model runs on fake tensors, inside of units too.

    batch [rows, ...] --operators--> output: where rows lie in each tensor, and which meetings of rows it depends on

The model runs twice, with two numbers of rows. A size that grows counts rows; a plain number that changes is computed
from the number of rows. Values that follow from no tensor of the model or the batch are known: tables of positions,
masks, zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from schedc_runtime.partition.structure import storage_of
from schedc_runtime.partition.user_line import user_line
from schedc_runtime.row_flow.basics import NUMBERS, Rule
from schedc_runtime.row_flow.flows import NOTHING, Flow, Meeting, OperatorCall, RowPlace, in_memory, scaled, tensors_of
from schedc_runtime.row_flow.table import FRESH, SIZED, rule_of

_MOST = 1 << 22
"""Elements of the largest tensor whose values are computed."""
_DENSE = 1 << 16
"""Elements of the largest tensor of one value that is written out."""
_FILLS = {"zeros": 0, "ones": 1, "empty": 0, "new_zeros": 0, "new_ones": 1, "new_empty": 0, "zeros_like": 0,
          "ones_like": 1, "empty_like": 0, "empty_strided": 0, "new_empty_strided": 0, "empty_permuted": 0,
          "full": None, "new_full": None, "full_like": None}  # fmt: skip
"""The value that an operator fills with; None for the argument ``fill_value``."""


def known_of(tensor: Tensor) -> Tensor | None:
    """[...] the values of a tensor that is no fake, on the CPU."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.numel() > _MOST:
        return None
    with _disable_current_modes():
        return tensor.detach().cpu()


def computed(
    function: torch._ops.OpOverload, name: str, given: Mapping[str, Any], args: Sequence[Any],
    kwargs: Mapping[str, Any], known: Callable[[Tensor], Tensor | None], results: Sequence[Tensor],
) -> list[Tensor] | None:  # fmt: skip
    """[results] the values that an operator gives; None where they are not known. A write is done to known values.

    known: the values of an argument.
    """
    if name in ("randperm", "randint", "rand", "randn") or torch.Tag.nondeterministic_seeded in function.tags:
        return None
    if any(result.numel() > _MOST and name not in _FILLS for result in results):
        return None
    with _disable_current_modes():
        if name in _FILLS:
            value = given["fill_value"] if _FILLS[name] is None else _FILLS[name]
            return [_filled(result, value) for result in results]
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name not in FRESH and not tensors:
            return None
        if any(known(tensor) is None for tensor in tensors):
            return None
        real = pytree.tree_map(lambda leaf: _real(leaf, known), (tuple(args), dict(kwargs)))
        try:
            with torch.no_grad():
                given_back = function(*real[0], **real[1])
        except Exception:
            return None
        return [leaf for leaf in pytree.tree_leaves(given_back) if isinstance(leaf, Tensor)]


def _filled(like: Tensor, value: Any) -> Tensor:
    filled = torch.full((), value, dtype=like.dtype, device="cpu").expand(like.shape)
    return filled.clone(memory_format=torch.contiguous_format) if filled.numel() <= _DENSE else filled


def _real(leaf: Any, known: Callable[[Tensor], Tensor | None]) -> Any:
    if isinstance(leaf, Tensor):
        return known(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


_COMPARED = 4096
"""Elements of the largest values that are compared between the runs."""


class Ran(NamedTuple):
    """One operator of the first run. numbers: its plain arguments. shapes, known: of its results."""

    name: str
    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    known: tuple[Tensor | None, ...]


class RowWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators of one run and, with those of a run on another number of rows, follows the rows.

    rows: their number, a prime. first: the other run, and its number of rows; None for the first one. position, module:
    where the recording is.
    """

    def __init__(
        self, rows: int, first: RowWatch | None, position: Callable[[], int], module: Callable[[], str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.first, self.position, self.module = rows, first, position, module
        self.ran: list[Ran] = []
        self.flows: dict[int, Flow] = {}
        self.meetings: list[Meeting] = []
        self.written: frozenset[int] = frozenset()
        """Numbers of the meetings that a parameter or buffer depends on behind the run."""
        self._alive: list[Tensor] = []
        self._sharing: dict[int, list[Tensor]] = {}
        self._state: dict[int, str] = {}
        self._returns: dict[str, int] = {}
        self._marks: dict[tuple[str, int], int] = {}
        self._next = 0
        self._other: Ran | None = None
        """The operator of the first run in the place of the latest."""
        self._astray: frozenset[int] = frozenset()
        """The meeting since which the runs have parted, if they have."""

    def enter_state(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The parameters and buffers of the model, of any shapes, by name."""
        self._state = {storage_of(tensor): name for name, tensor in tensors}

    def enter(self, tensor: Tensor, layout: RowPlace | None) -> None:
        """Begin with ``tensor`` [rows, ...] of the batch."""
        self.set(tensor, Flow(layout))

    def set(self, tensor: Tensor, flow: Flow) -> None:
        """From now on ``flow`` is known of a tensor of any shape."""
        self.flows[id(tensor)] = flow
        self._alive.append(tensor)
        self._sharing.setdefault(storage_of(tensor), []).append(tensor)

    def of(self, tensor: Tensor) -> Flow:
        """What is known of a tensor of any shape."""
        flow = self.flows.get(id(tensor))
        if flow is None and (known := known_of(tensor)) is not None:
            self.set(tensor, flow := Flow(known=known))
        return flow or NOTHING

    def meet(self, why: str, *, certain: bool = True) -> int:
        """Note a meeting of rows here; returns its number."""
        self.meetings.append(Meeting(self.module(), why, user_line(), self.position(), certain))
        return len(self.meetings) - 1

    # Operators.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        results = list(tensors_of(value))
        if not results or not isinstance(func, torch._ops.OpOverload):
            return value
        name = func._schema.name.partition("::")[2].removesuffix("_")
        given = _bound(func, args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        known = computed(func, name, given, args, kwargs, lambda tensor: self.of(tensor).known, results)
        values: Sequence[Tensor | None] = known or [None] * len(results)
        ran = Ran(name, _numbers(given), tuple(tuple(r.shape) for r in results), tuple(map(_kept, values)))
        self.ran.append(ran)
        if self.first is None:
            for result, own in zip(results, values, strict=True):
                self.set(result, Flow(known=own))
            return value
        with _disable_current_modes():
            self._compare(ran)
            call = OperatorCall(name, given, {id(t): self.of(t) for t in tensors}, results, self._grown(ran), self.rows)
            self._follow(call, func, ran, values)
            self._write(func, given, known is not None)
        return value

    def behind(self, module: str) -> None:
        """A module has returned. Behind a module that runs other operations the two runs go on side by side."""
        self._returns[module] = self._returns.get(module, 0) + 1
        mark = module, self._returns[module]
        if self.first is None:
            self._marks[mark] = len(self.ran)
        elif mark in self.first._marks:
            self._next, self._astray = self.first._marks[mark], frozenset()

    def _compare(self, ran: Ran) -> None:
        """Find the operator of the first run in this place; none where the runs have parted."""
        assert self.first is not None
        other = self.first.ran[self._next] if self._next < len(self.first.ran) else None
        self._next += 1
        alike = other is not None and (other.name, len(other.shapes)) == (ran.name, len(ran.shapes))
        if not alike and not self._astray:
            why = f"runs `{ran.name}`, and other operations on other numbers of rows"
            self._astray = frozenset({self.meet(why, certain=False)})
        self._other = other if not self._astray else None

    def _grown(self, ran: Ran) -> list[list[int]]:
        """[results] the dimensions that grow with the rows."""
        other = self._other
        if other is None:
            return [[dim for dim, size in enumerate(shape) if size % self.rows == 0] for shape in ran.shapes]
        assert self.first is not None
        return [scaled(a, self.first.rows, b, self.rows) for a, b in zip(other.shapes, ran.shapes, strict=True)]

    def _follow(
        self, call: OperatorCall, func: torch._ops.OpOverload, ran: Ran, values: Sequence[Tensor | None]
    ) -> None:
        """Set what is known of the results."""
        met = frozenset().union(*(flow.met for flow in call.flows.values())) if call.flows else frozenset()
        layouts: Sequence[RowPlace | None] = [None] * len(call.results)
        counts = self._counted(ran)
        if (call.with_rows or any(call.scaled)) and values[0] is None and call.name not in FRESH:
            layouts = _through(call, rule_of(call, func))
        if call.fresh or call.name in FRESH:
            met = frozenset()
        met |= self._astray | {self.meet(why, certain=certain) for why, certain in call.why}
        if counts:
            met |= {self.meet(f"`{call.name.strip('_')}` computes with the number of rows")}
        for result, layout, own in zip(call.results, layouts, values, strict=True):
            self.set(result, Flow(layout, met, own, call.step if layout else 0))

    def _counted(self, ran: Ran) -> bool:
        """Whether a plain argument or a known value changes with the number of rows."""
        other = self._other
        if other is None:
            return False
        if ran.name not in SIZED and other.numbers != ran.numbers:
            return True
        return any(
            mine is not None and theirs is not None and self._unlike(mine, theirs)
            for mine, theirs in zip(ran.known, other.known, strict=True)
        )  # fmt: skip

    def _unlike(self, mine: Tensor, theirs: Tensor) -> bool:
        """Whether the values of the two runs differ where both have some. Values with folded rows are not compared."""
        assert self.first is not None
        sizes = list(zip(mine.shape, theirs.shape, strict=False))
        if mine.dim() != theirs.dim() or any(a != b and (a, b) != (self.rows, self.first.rows) for a, b in sizes):
            return False
        common = tuple(slice(min(pair)) for pair in sizes)
        return not torch.equal(mine[common], theirs[common])

    # Writes.

    def _write(self, func: Any, given: Mapping[str, Any], known: bool) -> None:
        """Carry a write over to all tensors of the same memory."""
        for argument in func._schema.arguments if func._schema.is_mutable else ():
            target = given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(target, Tensor):
                self._carry(target, self.of(target), known)

    def _carry(self, target: Tensor, flow: Flow, known: bool) -> None:
        storage = storage_of(target)
        for other in self._sharing.get(storage, ()):
            if other is target:
                continue
            own = self.of(other)
            layout, met = own.layout, own.met | flow.met
            if layout is None and flow.layout is not None:
                layout = in_memory(flow.layout, target.shape, target.stride(), other.shape, other.stride(), self.rows)
                if layout is None:
                    met |= {self.meet("rows are written into a tensor that does not have all of them", certain=False)}
            self.flows[id(other)] = Flow(layout, met, own.known if known else None)
        if storage in self._state:
            self.written |= flow.met
            if flow.layout is not None:
                self.written |= {self.meet(f"rows are written into `{self._state[storage]}`")}


def _through(call: OperatorCall, rule: Rule | None) -> Sequence[RowPlace | None]:
    """[results] where the rows are behind an operator whose results are not known."""
    if not call.with_rows:
        call.lift()
    layouts = rule(call) if rule is not None else [None] * len(call.results)
    if rule is None and call.with_rows:
        call.meets("is not known to keep rows apart", certain=False)
    elif not call.with_rows and any(g and not layout for g, layout in zip(call.scaled, layouts, strict=True)):
        call.meets(NUMBERS, certain=False)
    return [
        layout or (RowPlace(grown[0], 1, result.shape[grown[0]] // call.rows) if grown else None)
        for layout, grown, result in zip(layouts, call.scaled, call.results, strict=True)
    ]


def _bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, defaults included."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return defaults | dict(zip(names, args, strict=False)) | dict(kwargs)


def _numbers(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The plain numbers among arguments."""
    return tuple(leaf for leaf in pytree.tree_leaves(dict(given)) if isinstance(leaf, (int, float, complex)))


def _kept(known: Tensor | None) -> Tensor | None:
    """A copy of values, which a later write may change; None for large ones."""
    if known is None or known.numel() > _COMPARED:
        return None
    with _disable_current_modes():
        return known.clone()
