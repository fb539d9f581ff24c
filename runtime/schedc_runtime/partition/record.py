"""Records a model's forward for one input signature, with fake tensors: nothing is computed and no memory taken.

A recording is described as plain values, so that two recordings of one model can be compared node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

from schedc_runtime.errors import BoundaryError, PartitionError, RuntimeFault
from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.partition.effects import as_around
from schedc_runtime.partition.example import call
from schedc_runtime.partition.fake_model import NEEDS_VALUES, lent, mode_of, python_state_watched, quiet, without_cache
from schedc_runtime.partition.left_out import check_head, leave_out
from schedc_runtime.partition.plain_numbers import asks_for_class, has_symbols, symbols_in_python
from schedc_runtime.partition.read_notes import ReadNotes
from schedc_runtime.partition.recorder import ForwardRecorder, Original, Recording
from schedc_runtime.partition.refusals import refuse_masks
from schedc_runtime.partition.structure import Template, recorded_masks, storage_of
from schedc_runtime.partition.symbols import Conditions, NotSymbolic, Places, Symbols, sizes_of_symbols
from schedc_runtime.partition.tensor_hooks import BESIDE
from schedc_runtime.partition.unit_calls import ASSUMED, CHECKPOINTED, TAPS, Apply, ContainerFill
from schedc_runtime.partition.user_line import user_line
from schedc_runtime.partition.values import plain_branches
from schedc_runtime.random_numbers.counting import CountedDraws
from schedc_runtime.random_numbers.interception import listening, session
from schedc_runtime.random_numbers.names import NamedCall, aliases_of

_WHOLE = "recorded_whole"
"""Attribute of modules without parameters that are single nodes nevertheless."""


class Inserted(Protocol):
    """Calls that are inserted while a model is recorded. points: paths of modules that are opened around."""

    points: tuple[str, ...]

    def around(self, recorder: ForwardRecorder) -> Callable[..., Any]:
        """What takes calls of modules, as ``recorder.call`` does. A recording begins."""
        ...

    def finish(self, recording: Recording) -> None:
        """Reads a recording that is complete. Raises `PartitionError` where the insertion is not exact."""
        ...

    def parted(self) -> str:
        """The place from which on tensors are parts now, if there is one."""
        ...


@dataclass(frozen=True)
class NodeRule:
    """Which modules are single nodes of a recording.

    units: they are. around: modules that contain a unit or a split point, which are recorded through. whole: single
    nodes in any case. Other modules are single nodes if they have parameters or are torch's own. What a module without
    parameters does is recorded, because it may depend on the batch alone: a table of positions does.
    """

    units: frozenset[str]
    around: frozenset[str]
    whole: frozenset[str] = frozenset()
    head: str = ""
    """The layer that is left out behind the last node; "" for none."""
    inserted: Inserted | None = None
    """What is inserted around calls of modules; None for nothing."""

    @classmethod
    def of(
        cls, units: Sequence[str], split_points: Sequence[str], head: str = "", inserted: Inserted | None = None
    ) -> NodeRule:
        around = {""}
        for name in (*units, *split_points, *(inserted.points if inserted is not None else ())):
            words = name.split(".")
            around.update(".".join(words[:depth]) for depth in range(1, len(words)))
        return cls(frozenset(units) - around, frozenset(around), head=head, inserted=inserted)

    def __call__(self, path: str, module: nn.Module) -> bool:
        if path in self.units or path in self.whole:
            return True
        if path in self.around:
            return False
        own = type(module).__module__
        return (
            own.startswith("torch.nn.") or hasattr(module, _WHOLE) or next(iter(module.parameters()), None) is not None
        )


Around = Callable[[ForwardRecorder, Mapping[str, Any]], AbstractContextManager[None]]
"""What is put around a forward that is recorded: a context, given the recorder and the fake arguments by name."""


def record(
    model: nn.Module, named: Mapping[str, Any], rule: NodeRule, *, training: bool, device: torch.device,
    around: Around | None = None, varying: Places = frozenset(),
) -> Recording:  # fmt: skip
    """The forward of ``model`` on arguments by name; a `TensorSpec` may replace a tensor.

    training: the mode of the modules around units. Gradients, inference mode and autocast are as around this call.
    varying: the sizes for which symbols stand; the recording then says which batches it holds for, or `NotSymbolic` is
    raised. Raises `PartitionError` for what cannot be recorded, and `BoundaryError` for arguments on which the model
    fails. Compiled code is recorded as if it were not compiled.
    """
    refuse_masks(model, named)
    try:
        with as_around():
            recording = _record(model, named, rule, training=training, device=device, around=around, varying=varying)
            return _finished(recording, rule)
    except _NeedsWhole as error:
        # A module without parameters, which takes a branch on values, is called and not recorded.
        whole = replace(rule, whole=rule.whole | {error.path})
    return record(model, named, whole, training=training, device=device, around=around, varying=varying)


class _NeedsWhole(Exception):
    """A module between units needs values. path: its name."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def _record(
    model: nn.Module, named: Mapping[str, Any], rule: NodeRule, *, training: bool, device: torch.device,
    around: Around | None, varying: Places,
) -> Recording:  # fmt: skip
    if rule.head:
        check_head(model, rule.head)
    through = modules_outside(model, rule)
    notes, symbols = ReadNotes(model), Symbols() if varying else None
    with (
        notes.put_back_behind(),
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=None if symbols is None else symbols.env),
        quiet(),
        without_cache(model),
        torch.compiler.set_stance("force_eager"),
        mode_of(model, through, training),
        lent(model, device) as paths,
        python_state_watched(model, {n: m for n in through if not rule(n, m := model.get_submodule(n))}),
        nullcontext() if symbols is None else symbols_in_python(model, through, symbols),
    ):
        aliases = aliases_of(model)
        counted = CountedDraws(model, aliases)
        recorder = ForwardRecorder(model, paths, rule, counted, aliases, notes)
        recording = recorder.recording
        inputs = _inputs(named, device, symbols, varying)
        recording.inputs = tuple(inputs)
        recorder.values.sizes = {} if symbols is None else symbols.hints
        for name, value in inputs.items():
            recorder.enter(name, value, [getattr(leaf, "known", None) for leaf in pytree.tree_leaves(named[name])])
        try:
            # Inside of `named_random` another listener notes draws.
            draws = listening(counted) if session() is None else nullcontext()
            outside = nullcontext() if around is None else around(recorder, inputs)
            calls = module_calls_to(recorder, model, None if rule.inserted is None else rule.inserted.around(recorder))
            with draws, calls, plain_branches(recorder), recorded_masks(), outside, recorder, notes.noting():
                output = call(model, inputs)
            recorder.leave(output)
        except (RuntimeFault, NotSymbolic):
            raise
        except NEEDS_VALUES as error:
            if not recorder.unit and recorder.stopped_in not in rule.around:
                raise _NeedsWhole(recorder.stopped_in) from None
            raise _needs_values(error, model, recorder.unit) from error
        except Exception as error:
            parted = rule.inserted.parted() if rule.inserted is not None else ""
            raise _fails(error, model, inputs, recorder.unit, parted) from error
        recording.description = description_of(recording)
        recording.conditions = None if symbols is None else _conditions(symbols, named, recorder)
    return recording


def _finished(recording: Recording, rule: NodeRule) -> Recording:
    """A recording that is complete, without its head if the rule leaves one out."""
    if rule.inserted is not None:
        rule.inserted.finish(recording)
    if rule.head:
        leave_out(recording, rule.head)
    return recording


def _conditions(symbols: Symbols, named: Mapping[str, Any], recorder: ForwardRecorder) -> Conditions:
    """The batches that a recording with symbols holds for."""
    if any(map(asks_for_class, recorder.notes.ran())):
        raise NotSymbolic("code compares the type of what may be a size")
    return symbols.conditions(sizes_of_symbols(pytree.tree_leaves(dict(named))), recorder.values.questions)


def modules_outside(model: nn.Module, rule: NodeRule) -> list[str]:
    """The names of the modules that are neither units nor inside of them."""
    return [name for name, _ in model.named_modules() if not _inside(name, rule.units) and name not in rule.units]


def _needs_values(error: BaseException, model: nn.Module, unit: str) -> RuntimeFault:
    line = user_line(error)
    if unit:
        return BoundaryError(
            f"`{unit}`: what it computes depends on the values of its input ({error}), so that the shape of its output"
            f" cannot be inferred in advance. Its first argument is no floating tensor, whose shape would do{line}",
            "compute with masks (torch.where, one_hot(...).sum(0)), or move what depends on values into a submodule"
            " that returns a floating tensor like its first argument",
        )
    return PartitionError(
        f"{type(model).__name__} takes a branch, a size or a number from the values of a tensor, between its units"
        f" ({error}): a pipeline runs the same operations on every microbatch{line}",
        "compute with masks, as `x = torch.where(s > 0, x + y, x)` in place of `if s > 0: x = x + y`; or move this into"
        " a submodule of its own, which is called and not recorded: it must return a tensor like its first argument",
    )


def _fails(error: BaseException, model: nn.Module, inputs: Mapping[str, Any], unit: str, parted: str) -> BoundaryError:
    leaves = [(name, leaf) for name, value in inputs.items() for leaf in pytree.tree_leaves(value)]
    shapes = ", ".join(
        f"{name}: {TensorSpec.of(leaf) if isinstance(leaf, Tensor) else repr(leaf)}" for name, leaf in leaves
    )
    where = f"`{unit}` of {type(model).__name__}" if unit else type(model).__name__
    own = f", of which each tensor rank has own rows from {parted} on" if parted and not unit else ""
    return BoundaryError(
        f"{where} fails on inputs of the shapes ({shapes}){own}: {type(error).__name__}: {error}{user_line(error)}",
        "compute behind this place what has all rows, such as a state that blocks add to; or take one tensor rank"
        if own
        else "if the model fails on such a microbatch outside of a pipeline too, mend the sizes of the batch or the"
        " model; if only here, an operation cannot run on fake tensors: move it into a submodule of its own",
    )


def _inside(name: str, units: frozenset[str]) -> bool:
    return any(name.startswith(f"{unit}.") for unit in units)


def _inputs(named: Mapping[str, Any], device: torch.device, symbols: Symbols | None, varying: Places) -> dict[str, Any]:
    """The arguments with fake tensors, whose ``varying`` sizes are symbols."""
    leaves, tree = pytree.tree_flatten(dict(named))
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, (Tensor, TensorSpec)):
            shape = tuple(leaf.shape) if symbols is None else symbols.shape(number, leaf.shape, varying)
            leaves[number] = torch.empty(shape, dtype=leaf.dtype, device=device)
    inputs: dict[str, Any] = pytree.tree_unflatten(leaves, tree)
    return inputs


@contextmanager
def module_calls_to(
    recorder: ForwardRecorder, model: nn.Module, take: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Sends the calls of all modules, and of functions with a backward of their own, to the recorder.

    take: what the calls of modules go to in its place.
    """
    plain = nn.Module.__call__
    kinds = {nn.Module} | {
        next(kind for kind in type(module).__mro__ if "__call__" in vars(kind)) for module in model.modules()
    }
    running: list[nn.Module] = []

    def replaced(original: Original) -> Original:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if running and running[-1] is self:  # a class with a call of its own, which calls that of nn.Module
                return original(self, *args, **kwargs)
            running.append(self)
            with recorder.notes.switched(False):
                if (compiled := self._compiled_call_impl) is not None:
                    self._compiled_call_impl = None
                try:
                    return (take or recorder.call)(self, args, kwargs, original)  # which `follow` replaces
                finally:
                    if compiled is not None:
                        self._compiled_call_impl = compiled
                    running.pop()

        return call

    def custom(kind: Any, apply: Original, args: tuple[Any, ...]) -> Any:
        return recorder.custom(kind, apply, args)

    with ExitStack() as stack:
        for kind in kinds:
            own = plain if kind is nn.Module else vars(kind)["__call__"]
            stack.enter_context(mock.patch.object(kind, "__call__", replaced(own)))
        stack.enter_context(custom_functions_to(custom))
        yield


@contextmanager
def custom_functions_to(take: Callable[[Any, Original, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Sends the calls of functions with a backward of their own to ``take(kind, apply, args)``.

    It replaces what `apply` of such a function calls: a model may keep `apply` itself, as ``f = MyFunction.apply``.
    """
    plain = vars(_SingleLevelFunction).get("apply") or vars(torch._C._FunctionBase)["apply"]

    def custom(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return take(kind, partial(plain.__get__(None, kind), **kwargs), args)

    with mock.patch.object(_SingleLevelFunction, "apply", classmethod(custom)):
        yield


Description = tuple[Any, ...]
_NOTES = ("random", "light", "ambient", TAPS, CHECKPOINTED, ASSUMED)


def description_of(recording: Recording) -> Description:
    """Everything that stages are made of: nodes with arguments, results and memory, entries, calls and the output."""
    nodes = {node: number for number, node in enumerate(recording.graph.nodes)}
    memory: dict[int, int] = {}
    for node in nodes:
        if isinstance(value := node.meta.get("val"), Tensor):
            memory.setdefault(storage_of(value), len(memory))
    return (
        [_node(node, nodes, memory) for node in nodes],
        [(name, nodes.get(last, -1)) for name, last in recording.entries],
        [nodes[call] for call in recording.calls],
        recording.assumed,
        recording.inputs,
        _template(recording.output) if recording.output is not None else None,
    )


def equal(a: Any, b: Any) -> bool:
    """Whether two descriptions are the same. Objects of the model are compared by identity, then by value."""
    if a is b:
        return True
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    try:
        return type(a) is type(b) and (_same_function(a, b) if isinstance(a, FunctionType) else bool(a == b))
    except Exception:  # objects that cannot be compared, and functions that keep each other
        return False


def _same_function(a: FunctionType, b: FunctionType) -> bool:
    """Whether two functions come from one line and keep the same values."""
    if a.__code__ is not b.__code__ or a.__globals__ is not b.__globals__:
        return False
    kept = [
        (each.__defaults__, each.__kwdefaults__, [cell.cell_contents for cell in each.__closure__ or ()])
        for each in (a, b)
    ]
    return equal(*kept)


def _node(node: fx.Node, nodes: Mapping[fx.Node, int], memory: Mapping[int, int]) -> Any:
    meta, value = node.meta, node.meta.get("val")

    def number(argument: fx.Node) -> Any:
        return "node", nodes[argument]

    return (
        node.op,
        _target(node.target),
        fx.node.map_arg((node.args, node.kwargs), number),
        [meta.get(note) for note in _NOTES],
        [(event.name, event.active) for event in meta.get("draws", ())],
        sorted(memory.get(storage, -1) for storage in meta.get("mutates", ())),
        [nodes[meta[other]] if other in meta else -1 for other in ("part_of", BESIDE)],
        (TensorSpec.of(value), value.device, memory[storage_of(value)]) if isinstance(value, Tensor) else None,
    )


def _target(target: Any) -> Any:
    if isinstance(target, NamedCall):
        return "named", target.name, target.function
    if isinstance(target, ContainerFill):
        return "built", _template(target.template)
    return ("apply", target.kind) if isinstance(target, Apply) else target


def _template(template: Template) -> Any:
    like = template.like
    if like is None:
        return None
    if has_symbols(like.rest):
        raise NotSymbolic(f"a {like.kind.__name__} keeps a size")
    return like.kind, like.keys, like.rest, [_template(inner) for inner in template.inner]
