"""Records the forward of a module with fake tensors, while a step runs and without touching anything of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.effects import ambient, enter
from schedc_runtime.partition.fake_model import lent, python_state_watched, quiet, without_cache
from schedc_runtime.partition.record import module_calls_to
from schedc_runtime.partition.recorder import ForwardRecorder
from schedc_runtime.partition.structure import Template
from schedc_runtime.random_numbers.counting import CountedDraws
from schedc_runtime.recompute.regions import unrecorded

T = TypeVar("T")

WITHIN = "within"
"""Key in the meta of a node: paths of the modules, from outside to inside, in whose code the call is."""


@dataclass(frozen=True)
class ModuleRecord:
    """The forward of a module for one signature. output: structure of its result."""

    graph: fx.Graph
    output: Template


class _ModuleRecorder(ForwardRecorder):
    """Notes in whose code each call is."""

    def _add(self, op: str, target: Any, args: Any, kwargs: Any, name: str | None = None) -> fx.Node:
        node = super()._add(op, target, args, kwargs, name)
        node.meta[WITHIN] = tuple(self._through)
        return node


def isolated(run: Callable[[], T]) -> T:
    """The result of ``run`` on another thread: hooks, modes and random keys of a step are not those of a recording."""
    state = ambient()

    def begin() -> T:
        enter(state)
        with unrecorded():
            return run()

    return _in_thread(begin)


def record_module(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    through: Collection[str],
    names: Mapping[str, str],
) -> ModuleRecord:
    """The forward of ``module`` on arguments like these, in its present modes.

    through: paths of the submodules whose code is recorded; others are single nodes. names: by path, the names by which
    modules draw random numbers. Call it in `isolated`. Raises whatever the forward raises on fake tensors.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.enable_grad(),
        quiet(),
        without_cache(module),
        torch.compiler.set_stance("force_eager"),
        lent(module, device) as paths,
    ):
        recorder = _ModuleRecorder(
            module, paths, lambda path, _: path not in through, CountedDraws(module, names), names
        )
        given = pytree.tree_map(lambda leaf: _fake(leaf, device), (tuple(args), dict(kwargs)))
        for number, leaf in enumerate(x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)):
            recorder.enter(f"input{number}", leaf)
        before = {path: dict(vars(part)) for path, part in module.named_modules() if path in through}
        with python_state_watched(module, {}), module_calls_to(recorder, module), recorder:
            output = recorder.call(module, given[0], given[1], _forward)
        if written := [f"{path}.{key}".lstrip(".") for path in before for key in _written(module, path, before[path])]:
            raise PartitionError(f"it sets `{written[0]}` at each run, and recorded code would not")
        recorder.leave(output)
    assert recorder.recording.output is not None
    return ModuleRecord(recorder.recording.graph, recorder.recording.output)


def _written(module: nn.Module, path: str, before: Mapping[str, Any]) -> list[str]:
    """The public attributes of a submodule that are others than ``before``."""
    own = vars(module.get_submodule(path))
    return [key for key in own if not key.startswith("_") and own[key] is not before.get(key, own)]


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _fake(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(
        leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad
    )


def _in_thread(run: Callable[[], T]) -> T:
    results: list[T] = []
    failures: list[BaseException] = []

    def begin() -> None:
        try:
            results.append(run())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=begin, name="record")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
