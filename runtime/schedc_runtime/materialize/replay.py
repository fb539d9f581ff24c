"""Makes a recorded tensor: runs the operations that it needs, on real storages, with random numbers by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from schedc_runtime.errors import MaterializeError
from schedc_runtime.materialize.tape import Captured, Operation, Tape, View
from schedc_runtime.random_numbers.session import default_generator

_CPU = torch.device("cpu")
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
_MOVES = {"clone", "_to_copy", "copy_", "contiguous", "lift_fresh", "detach", "alias"}
_FILLS = _EMPTY | {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "zero_", "fill_", "new_zeros"}

Seeds = Callable[[int], int]
"""The seed of a random operation, by its number on the tape."""


def filled(tape: Tape, view: View) -> bool:
    """Whether some operation gives ``view`` its values: one that does more than to allocate or to copy."""
    operations = [tape.operations[index] for index in tape.needs(view)]
    return 0 in view.size or any(
        operation.kind not in _EMPTY | _MOVES or any(isinstance(arg, Captured) for arg in operation.args)
        for operation in operations
    )


def make(tape: Tape, view: View, device: torch.device, seeds: Seeds) -> Tensor:
    """[view.size] the tensor that ``view`` was at the end of the recording, on ``device``.

    Random numbers are drawn on ``device``. Arithmetic without random numbers runs where the construction would have
    run it, so that its bits are those of a construction there.
    """
    order = tape.needs(view)
    operations = [tape.operations[index] for index in order]
    anywhere = any(x.random for x in operations) or all(x.kind in _FILLS for x in operations)
    where = device if anywhere else next((x.device for x in operations if x.device is not None), _CPU)
    storages: dict[int, torch.UntypedStorage] = {}
    last_use = {view.storage: len(order)}
    for position, operation in reversed(list(enumerate(operations))):
        for used in _views((operation.args, operation.kwargs, operation.outputs)):
            last_use.setdefault(used.storage, position)
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        for position, (index, operation) in enumerate(zip(order, operations, strict=True)):
            if operation.random:
                default_generator(where).manual_seed(seeds(index))
            _run(tape, operation, storages, where)
            for storage in [x for x in storages if last_use[x] <= position]:
                del storages[storage]
        return view.of(storages[view.storage]).to(device)


def seeds_by_name(tape: Tape, named: Iterable[tuple[str, View]], seed: int) -> Seeds:
    """Seeds that depend on ``seed``, the name that owns the operation, and how many random ones the name had before.

    named: all names of the model in its order, with their tensors. An operation that several need belongs to the first.
    """
    ordinals: Counter[str] = Counter()
    keys: dict[int, str] = {}
    for index, name in sorted(tape.owners(named).items()):
        if tape.operations[index].random:
            keys[index] = f"{name}/{ordinals[name]}"
            ordinals[name] += 1
    return lambda index: seed_of(seed, keys[index])


def seed_of(seed: int, key: str) -> int:
    """A seed of 63 bits for ``key``."""
    return int.from_bytes(blake2b(f"{seed}/{key}".encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Puts the generators of the CPU and of ``device`` back as they were."""
    generators = [default_generator(place) for place in {_CPU, device}]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _run(tape: Tape, operation: Operation, storages: dict[int, torch.UntypedStorage], device: torch.device) -> None:
    """Run one operation and keep the storages of its results."""

    def real(value: Any) -> Any:
        if isinstance(value, View):
            return value.of(storages[value.storage])
        return tape.constants[value.number].to(device) if isinstance(value, Captured) else value

    args, kwargs = _map((operation.args, dict(operation.kwargs)), real)
    if kwargs.get("device") is not None:
        kwargs["device"] = device
    result = operation.function(*args, **kwargs)
    for made, view in zip(pytree.tree_leaves(result), operation.outputs, strict=bool(operation.outputs)):
        if view is not None and view.storage not in storages:
            storages[view.storage] = _as_recorded(operation, made, view).untyped_storage()


def _as_recorded(operation: Operation, made: Tensor, view: View) -> Tensor:
    """A result with the strides that were recorded, which views of it count on."""
    if tuple(made.shape) != view.size or made.dtype != view.dtype:
        raise MaterializeError(
            f"`{operation.kind}` gave {made.dtype}{list(made.shape)}, recorded was {view.dtype}{list(view.size)}",
            "its shape depends on values: give this tensor by `init=`",
        )
    if tuple(made.stride()) == view.stride and made.storage_offset() == view.offset:
        return made
    extent = view.offset + 1 + sum((n - 1) * s for n, s in zip(view.size, view.stride, strict=True))
    whole = torch.empty(max(extent, 0), dtype=view.dtype, device=made.device)
    view.of(whole.untyped_storage()).copy_(made)
    return whole


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    return pytree.tree_map(function, tree, is_leaf=_is_tensor)


def _views(tree: Any) -> Iterator[View]:
    return (leaf for leaf in pytree.tree_leaves(tree, is_leaf=_is_tensor) if isinstance(leaf, View))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, View | Captured)


def without_draws(tape: Tape, view: View) -> Mapping[int, Operation]:
    """The random operations that ``view`` needs, by number: {} for a value that is the same in every run."""
    return {index: tape.operations[index] for index in tape.needs(view) if tape.operations[index].random}
