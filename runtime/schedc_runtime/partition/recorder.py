"""Records one forward of a model: every torch function is a node, and so is every call of a chosen module.

Python runs for real on fake tensors. Sizes, flags and branches on them become part of the recording, so that it holds
for the shapes that it was made with. Only a branch on the values of a tensor cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointFunction

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.effects import after, ambient
from schedc_runtime.partition.fake_model import NEEDS_VALUES, fake_only, python_random_kept
from schedc_runtime.partition.plain_numbers import sized
from schedc_runtime.partition.read_notes import ReadNotes, paused
from schedc_runtime.partition.reads import Read
from schedc_runtime.partition.structure import Part, Template, hides_tensors, storage_of, structure_parts, tensors_in
from schedc_runtime.partition.symbols import Conditions
from schedc_runtime.partition.tensor_hooks import TensorHooks, hooked_code, refuse_effect, refuse_written, shown_hook
from schedc_runtime.partition.unit_calls import (
    ASSUMED,
    CHECKPOINTED,
    TAPS,
    Apply,
    ContainerFill,
    called,
    hidden,
    in_checkpoint,
    specs,
)
from schedc_runtime.partition.user_line import user_line
from schedc_runtime.partition.values import AskedValues
from schedc_runtime.random_numbers.counting import CountedDraws
from schedc_runtime.random_numbers.names import NamedCall, may_draw

Original = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Tap(NamedTuple):
    """An output of a submodule inside of a recorded call: of ``submodule``, in its ``number``-th call there."""

    call: fx.Node
    submodule: str
    number: int
    way: tuple[Part, ...]


@dataclass
class Recording:
    """What a forward did.

    graph: nodes with ``meta``. ``val`` is the fake result, ``part_of`` the call whose result has the node as a part.
        ``mutates`` has the storages that the node writes to. ``random`` marks a node that draws numbers, ``light`` a
        node for one use. ``ambient`` is set where gradients or autocast are not as around the model.
    calls: the calls of chosen modules, in order. entries: (path, last node before it) of every module call
    between units. output, inputs: structure of the result, and names of the arguments.
    assumed: submodules whose output was taken to have the shape of their first argument. head: the layer that was left
    out behind the last node (`left_out`), or "". reads: what Python reads between units. asked: arguments whose values
    were asked for. conditions: the batches that it holds for, where sizes are symbols. description: see `described`.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    calls: list[fx.Node] = field(default_factory=list)
    entries: list[tuple[str, fx.Node | None]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    output: Template | None = None
    inputs: tuple[str, ...] = ()
    head: str = ""
    reads: list[Read] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    conditions: Conditions | None = None
    description: tuple[Any, ...] = ()

    @property
    def called(self) -> list[str]:
        """[calls] the name of the module in each call between units."""
        return [name for name, _ in self.entries]


class ForwardRecorder(TorchFunctionMode):
    """The mode under which a model is recorded. It writes `recording`.

    paths: path of each tensor of the model, by id. is_node: whether the module at a path is a single node. draws: notes
    the draws. aliases: those of the model. notes: what Python reads.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[int, str],
        is_node: Callable[[str, nn.Module], bool],
        draws: CountedDraws,
        aliases: Mapping[str, str],
        notes: ReadNotes | None = None,
    ) -> None:
        super().__init__()
        self.recording, self.notes = Recording(), notes or ReadNotes(model)
        self._paths, self._is_node, self._draws, self._aliases = paths, is_node, draws, aliases
        self._through: list[str] = []
        """Paths of the modules that are being recorded through, the innermost last."""
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._parameters = {storage_of(parameter): name for name, parameter in model.named_parameters()}
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []
        """Everything that has been recorded: an id must not be used again."""
        self._inside: dict[int, Tap] = {}
        self._attributes: dict[str, fx.Node] = {}
        self._call: list[tuple[str, int, Any]] | None = None
        """(submodule, number of its call, result) inside of the call that is being recorded."""
        self.unit = ""
        """Path of the single node that is being called; "" between them."""
        self.stopped_in = ""
        """Path of the innermost module, recorded through, in which a value was needed; "" for the model itself."""
        self._checkpointing, self._ambient = False, ambient()
        self._latest: fx.Node | None = None
        self._hooks = TensorHooks()
        self.values = AskedValues(self.recording.graph, self.recording.asked, self._nodes)

    def enter(self, name: str, value: Any, known: Sequence[Any] = ()) -> None:
        """An argument of the model. known: [leaves] what is known of each, or None; () for nothing."""
        node = self.recording.graph.create_node("placeholder", name.strip("*_") or "value")
        node.meta["argument"] = name
        self._know(value, node)
        self.values.note(value, known)

    def leave(self, output: Any) -> None:
        """The output of the model."""
        self.recording.output, leaves = Template.of(output)
        self.recording.graph.output(tuple(self.argument(leaf, "the model's output") for leaf in leaves))
        self._hooks.finish(self.recording.graph)
        self.recording.reads = self.notes.reads()

    # Functions.

    @paused
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_effect(func)
        if func is Tensor.register_hook and args[0].requires_grad:
            return self.hook(*args, **kwargs)
        versions = [(tensor, tensor._version) for tensor in tensors_in((tuple(args), dict(kwargs)))]
        try:
            result = func(*args, **kwargs)
        except NEEDS_VALUES:
            if (result := self.values.read(func, args, kwargs)) is None:
                raise
            if next(tensors_in(result), None) is None:
                return result
        written = [tensor for tensor, version in versions if tensor._version != version]
        if not written and next(tensors_in(result), None) is None:
            return shown_hook(func, result)
        target, given = called(func), tuple(args)
        if target is getattr:
            given = (args[0], func.__self__.__name__)
        what = f"`{getattr(target, '__name__', target)}`"
        if random := may_draw(func):
            target = NamedCall(self._aliases.get(path := self._through[-1] if self._through else "", path), target)
        node = self._add("call_function", target, self.argument(given, what), self.argument(dict(kwargs), what))
        node.meta |= {"random": random, "draws": self._draws.take()}
        self._know(result, node)
        self._write(written, node, result)
        return result

    def hook(self, tensor: Tensor, hook: Any) -> Any:
        """Record that ``hook`` is registered on ``tensor`` [...]; returns its handle."""
        source, latest = self.node(tensor), self._latest
        handle = self._hooks.add(self._add("call_function", hooked_code, (source, hook), {}), source, hook)
        self._latest = latest  # the place of a hook says nothing about its stage
        return handle

    def _add(self, op: str, target: Any, args: Any, kwargs: Any, name: str | None = None) -> fx.Node:
        name = str(name or (getattr(target, "__name__", "value") if callable(target) else target))
        node = self.recording.graph.create_node(op, target, args, kwargs, name.strip("_").replace(".", "_") or "value")
        if (state := ambient()) != self._ambient:
            node.meta["ambient"] = state
        self._latest = node
        return node

    def _know(self, value: Any, node: fx.Node) -> None:
        """The tensors of ``value``, the result of a node, are its parts from now on."""
        if isinstance(value, Tensor):
            self._nodes[id(value)] = node
            self._alive.append(value)
            node.meta["val"] = value
            return
        for part in structure_parts(value):
            if next(tensors_in(part.value), None) is not None:
                self._know(part.value, self._part(node, part))

    def _part(self, node: fx.Node, part: Part) -> fx.Node:
        taken = self._add("call_function", part.take, (node, part.key), {}, f"{node.name}_{part.key}")
        taken.meta["part_of"] = node.meta.get("part_of", node)
        taken.meta.pop("ambient", None)
        return taken

    def _write(self, written: Sequence[Tensor], node: fx.Node, result: Any) -> None:
        """``node`` has written to tensors: every tensor in the same memory depends on ``node`` from now on."""
        if not written:
            return
        storages = {storage_of(tensor) for tensor in written}
        refuse_written(self._parameters, storages, node)
        node.meta |= {"mutates": storages, "line": user_line()}
        own = {id(tensor) for tensor in tensors_in(result)}
        for tensor in self._sharing(storages):
            if id(tensor) not in own:
                later = self._add("call_function", after, (self.node(tensor), node), {})
                self._know(tensor, later)

    def _sharing(self, storages: set[int]) -> list[Tensor]:
        known = {id(tensor): tensor for tensor in self._alive if isinstance(tensor, Tensor)}
        return [tensor for tensor in known.values() if storage_of(tensor) in storages]

    # Arguments.

    def argument(self, value: Any, where: str) -> Any:
        """What stands in the graph for an argument. where: what is called, for errors."""
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, slice):
            return slice(*(self.argument(bound, where) for bound in (value.start, value.stop, value.step)))
        if type(value) is dict:
            return {key: self.argument(item, where) for key, item in value.items()}
        if type(value) in (tuple, list, torch.Size):
            return (list if type(value) is list else tuple)(self.argument(item, where) for item in value)
        if next(tensors_in(value), None) is not None:
            template, leaves = Template.of(value)
            node = self._add("call_function", ContainerFill(template), (self.argument(leaves, where),), {}, "built")
            node.meta["light"] = True
            return node
        if hides_tensors(value):
            raise hidden(value, where)
        return sized(value, where)

    def node(self, tensor: Tensor) -> fx.Node:
        """The node whose result ``tensor`` is, of any shape. Raises `PartitionError` for a tensor of unknown origin."""
        if (node := self._nodes.get(id(tensor))) is not None:
            return node
        if (path := self._paths.get(id(tensor))) is not None:
            if path not in self._attributes:
                graph = self.recording.graph
                self._attributes[path] = graph.create_node("get_attr", path, name=path.replace(".", "_"))
                self._know(tensor, self._attributes[path])
            return self._nodes[id(tensor)]
        if (tap := self._inside.get(id(tensor))) is not None:
            self._know(tensor, self._tapped(tap))
            return self._nodes[id(tensor)]
        raise PartitionError(
            f"a tensor of shape {list(tensor.shape)} comes from outside of the recorded forward{user_line()}",
            "make it a buffer of a module (register_buffer), or make it where it is used. What a module keeps from"
            " inside of a block must be returned by the block",
        )

    def _tapped(self, tap: Tap) -> fx.Node:
        """The node of an output of a submodule. Its call gives (result, an output per tap) from now on."""
        call, latest = tap.call, self._latest
        if TAPS not in call.meta:
            call.meta[TAPS] = []
            with self.recording.graph.inserting_after(call):
                whole = self._part(call, Part(getitem, 0, None))
            call.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
            whole.meta["val"] = call.meta.pop("val", None)
            self._nodes |= dict.fromkeys([key for key, node in self._nodes.items() if node is call], whole)
        taps: list[tuple[str, int]] = call.meta[TAPS]
        if (tap.submodule, tap.number) not in taps:
            taps.append((tap.submodule, tap.number))
        node = call
        for part in (Part(getitem, taps.index((tap.submodule, tap.number)) + 1, None), *tap.way):
            with self.recording.graph.inserting_after(node):
                node = self._part(node, part)
        self._latest = latest
        return node

    # Calls of modules and of functions with a backward of their own.

    @paused
    def custom(self, kind: Any, original: Original, args: Args) -> Any:
        """A call of a `torch.autograd.Function`. Reentrant checkpointing calls what it was given, with gradients."""
        if kind is CheckpointFunction:
            outer, self._checkpointing = self._checkpointing, True
            try:
                with self.notes.switched(True):
                    return args[0](*args[2:])
            finally:
                self._checkpointing = outer
        if self._call is not None or not torch._C._len_torch_function_stack():  # inside of a unit, or of a function
            return original(*args)
        with _pop_mode_temporarily():
            result = original(*args)
        node = self._add("call_function", Apply(kind), self.argument(args, f"`{kind.__name__}`"), {})
        node.meta |= {"random": True, "draws": self._draws.take()}  # nothing is known of it
        self._know(result, node)
        return result

    def call(self, module: nn.Module, args: Args, kwargs: Kwargs, original: Original) -> Any:
        """A call of any module."""
        path = self._modules.get(id(module))
        if self._call is not None:
            return self._inner(module, path, args, kwargs, original)
        if path is None or not self._is_node(path, module):
            if path is not None:
                self.recording.entries.append((path, self._latest))
            return self._inside_of(path, original, module, args, kwargs)
        return self._single(module, path, args, kwargs, original)

    def _inside_of(self, path: str | None, original: Original, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of a module that is recorded through."""
        self._through += [path] if path is not None else []
        try:
            with self.notes.switched(True):
                return original(module, *args, **kwargs)
        except NEEDS_VALUES:
            self.stopped_in = self.stopped_in or path or ""
            raise
        finally:
            del self._through[len(self._through) - (path is not None) :]

    def _single(self, module: nn.Module, path: str, args: Args, kwargs: Kwargs, original: Original) -> Any:
        """A call of a module that is a single node."""
        named = {f"argument {position}": value for position, value in enumerate(args)} | {
            f"argument `{key}`": value for key, value in kwargs.items()
        }
        mapped = {key: self.argument(value, f"{key} of `{path}`") for key, value in named.items()}
        values = list(mapped.values())
        versions = [(tensor, tensor._version) for tensor in tensors_in(list(named.values()))]
        checkpointed, assumed = self._checkpointing or in_checkpoint(), len(self.recording.assumed)
        self._call, self.unit = [], path
        try:
            with _pop_mode_temporarily(), python_random_kept():
                result = self._result(module, path, args, kwargs, original)
        finally:
            inner, self._call = self._call, None
        self.unit = ""
        self.recording.entries.append((path, self._latest))
        node = self._add(
            "call_module", path, tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
        )
        node.meta |= {"draws": self._draws.take(), CHECKPOINTED: checkpointed}
        if len(self.recording.assumed) > assumed:
            node.meta[ASSUMED] = specs(result)
        self.recording.calls.append(node)
        self._refuse_state(named, path)
        self._know(result, node)
        self._write([tensor for tensor, version in versions if tensor._version != version], node, result)
        for submodule, number, value in inner:
            self._remember(value, Tap(node, submodule, number, ()))
        return result

    def _result(self, module: nn.Module, path: str, args: Args, kwargs: Kwargs, original: Original) -> Any:
        """The fake result of a single node. A node that depends on values is assumed to return its first argument."""
        assumed = len(self.recording.assumed)
        try:
            return original(module, *args, **kwargs)
        except Exception as error:
            first = next(tensors_in((args, kwargs)), None)
            misled = len(self.recording.assumed) > assumed  # by what was assumed of a submodule
            if not (isinstance(error, NEEDS_VALUES) or misled) or first is None or not first.is_floating_point():
                raise
            self.recording.assumed.append(path)
            return torch.empty_like(first, requires_grad=True)

    def _inner(self, module: nn.Module, path: str | None, args: Args, kwargs: Kwargs, original: Original) -> Any:
        """A call inside of a single node: its result may turn up outside, taken out by a hook."""
        assert self._call is not None
        try:
            result = original(module, *args, **kwargs)
        except Exception as error:
            first = next(tensors_in((args, kwargs)), None)
            if path in (None, self.unit) or first is None or not fake_only(error):
                raise
            self.recording.assumed.append(str(path))
            result = torch.empty_like(first, requires_grad=first.is_floating_point())
        if path is not None and path != self.unit:
            number = sum(submodule == path for submodule, _, _ in self._call)
            self._call.append((path, number, result))
        return result

    def _remember(self, value: Any, tap: Tap) -> None:
        if isinstance(value, Tensor):
            self._alive.append(value)
            self._inside.setdefault(id(value), tap)
        for part in structure_parts(value):
            self._remember(part.value, tap._replace(way=(*tap.way, part._replace(value=None))))

    def _refuse_state(self, named: Mapping[str, Any], path: str) -> None:
        """Refuse objects that have got tensors in the call."""
        for name, value in named.items():
            if next(tensors_in(value), None) is None and hides_tensors(value):
                raise hidden(value, f"{name} of `{path}`")
