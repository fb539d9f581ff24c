"""Where the rows of a batch lie in a tensor, what else is known of it, and the places where rows meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class RowPlace(NamedTuple):
    """The rows lie in dimension ``dim``, whose size is ``outer * rows * inner``; its index is (outer, row, inner).

    What lies at a row follows from that row of the batch alone, not from its number.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> RowPlace:
        """The same in another dimension."""
        return RowPlace(dim, self.outer, self.inner)


def layout_candidates(shape: Sequence[int], rows: int) -> Iterator[RowPlace]:
    """Where rows may lie in a tensor: behind or ahead of all else that is folded with them."""
    for dim, size in enumerate(shape):
        if size % rows == 0:
            yield from dict.fromkeys((RowPlace(dim, 1, size // rows), RowPlace(dim, size // rows, 1)))


def viewed(layout: RowPlace, before: Sequence[int], after: Sequence[int], rows: int) -> RowPlace | None:
    """Where the rows are in a tensor of the shape ``after`` that has the order of one of the shape ``before``.

    None where the new dimensions cut across rows. rows: their number, a prime that divides no other size.
    """
    outer, ahead = prod(before[: layout.dim]) * layout.outer, 1
    for dim, size in enumerate(after):
        own = outer // ahead
        if outer % ahead == 0 and size % (own * rows) == 0:
            return RowPlace(dim, own, size // (own * rows))
        ahead *= size
    return None


def in_memory(layout: RowPlace, shape: Sequence[int], stride: Sequence[int], other: Sequence[int],
              other_stride: Sequence[int], rows: int) -> RowPlace | None:  # fmt: skip
    """Where the rows are in another tensor of the same memory; None where it does not have all of them.

    shape, stride: those of the tensor whose place of rows is known. other, other_stride: those of the other tensor, in
    elements.
    """
    step = stride[layout.dim] * layout.inner
    for dim, size in enumerate(other):
        own = other_stride[dim]
        if own and step % own == 0 and size % (rows * (step // own)) == 0:
            return RowPlace(dim, size // (rows * (step // own)), step // own)
    return None


def sliced_layout(layout: RowPlace, start: int, length: int, rows: int) -> RowPlace | None:
    """Where the rows are in ``length`` indices from ``start`` on, of the dimension of the rows.

    None where some rows are not in there. Whole blocks of all rows may be taken out.
    """
    block = rows * layout.inner
    if start % block or length % block or not length:
        return None
    return layout._replace(outer=length // block)


def scaled(first: Sequence[int], rows_first: int, shape: Sequence[int], rows: int) -> list[int]:
    """The dimensions that grow with the number of rows. first: the shape of the tensor for ``rows_first`` rows."""
    if len(first) != len(shape):
        return []
    return [d for d, (a, b) in enumerate(zip(first, shape, strict=True)) if a != b and a * rows == b * rows_first]


class Meeting(NamedTuple):
    """A place where rows of a microbatch see each other.

    module: the innermost module that is called there; "" for the model itself. why: a clause that begins with the
    operation. line: of the model's code, as of `user_line`. position: nodes of the recording before it. certain: False
    where the operation may keep rows apart after all.
    """

    module: str
    why: str
    line: str
    position: int
    certain: bool

    def __str__(self) -> str:
        return (f"in `{self.module}` " if self.module else "") + self.why + self.line


class Flow(NamedTuple):
    """What is known of a tensor.

    layout: where rows lie; None where nothing of a row is in it. met: numbers of the meetings behind the tensor.
    known: [...] its values, where they follow from no tensor of the model or the batch. step: what the number of a row
    adds to a value, for indices of rows in a longer dimension.
    """

    layout: RowPlace | None = None
    met: frozenset[int] = frozenset()
    known: Tensor | None = None
    step: int = 0


NOTHING = Flow()


@dataclass
class OperatorCall:
    """An operator's call, for the operator's rule.

    name: as in the schema, without ``aten::`` and without the underscore of a write. given: arguments by name, defaults
    included. flows: of each tensor among the arguments, by id. results: the tensors that it gave. scaled: [results]
    dimensions that grow with the number of rows. why: meetings that the rule found, with whether each is certain.
    """

    name: str
    given: Mapping[str, Any]
    flows: Mapping[int, Flow]
    results: Sequence[Tensor]
    scaled: Sequence[Sequence[int]]
    rows: int
    why: list[tuple[str, bool]] = field(default_factory=list)
    step: int = 0
    fresh: bool = False
    """Whether the results do not depend on the values of the arguments."""

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    def of(self, tensor: Any) -> Flow:
        return self.flows.get(id(tensor), NOTHING) if isinstance(tensor, Tensor) else NOTHING

    def layout(self, name: str) -> RowPlace | None:
        """Where the rows are in the argument ``name``."""
        return self.of(self.given.get(name)).layout

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return [leaf for leaf in pytree.tree_leaves(dict(self.given)) if isinstance(leaf, Tensor)]

    @property
    def with_rows(self) -> list[Tensor]:
        """The arguments that have rows."""
        return [tensor for tensor in self.tensors if self.of(tensor).layout is not None]

    def lift(self) -> None:
        """Let known arguments that are the same at every row have rows: there are no others."""
        for tensor in self.tensors:
            flow = self.of(tensor)
            same = (at for at in layout_candidates(tensor.shape, self.rows) if uniform(tensor, flow, at, self.rows))
            if flow.known is not None and (layout := next(same, None)) is not None:
                self.flows = {**self.flows, id(tensor): flow._replace(layout=layout)}

    def meets(self, why: str, *, certain: bool = True) -> None:
        """Note that rows meet. why: what follows the name of the operation."""
        self.why.append((f"`{self.name.strip('_')}` {why}", certain))


def uniform(tensor: Tensor, flow: Flow, layout: RowPlace, rows: int) -> bool:
    """Whether a tensor [...] without rows is the same at every row of ``layout``, one of its dimensions."""
    if tensor.stride(layout.dim) == 0:
        return True
    return flow.known is not None and step_of(flow.known, layout, rows) == 0


def split_rows(tensor: Tensor, layout: RowPlace, rows: int) -> Tensor:
    """``tensor`` [...] with dimensions (outer, rows, inner) in place of that of the rows; a view where that can be."""
    shape = tensor.shape
    return tensor.view(*shape[: layout.dim], layout.outer, rows, layout.inner, *shape[layout.dim + 1 :])


def step_of(known: Tensor, layout: RowPlace, rows: int) -> int | None:
    """What the number of a row adds to the values of ``known`` [...]; None if these differ otherwise."""
    parts = split_rows(known, layout, rows).movedim(layout.dim + 1, 0)
    if bool((parts == parts[:1]).all()):
        return 0
    if parts.dtype.is_floating_point or parts.dtype.is_complex or parts.dtype == torch.bool:
        return None
    steps = parts[1:] - parts[:-1]
    first = int(steps.flatten()[0])
    return first if bool((steps == first).all()) else None


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors [...] of an operator's result, in order."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
