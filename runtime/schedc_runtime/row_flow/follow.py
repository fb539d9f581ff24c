"""Runs a model on two numbers of rows, with fake tensors, and says where rows of a microbatch meet."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.partition.example import named_arguments
from schedc_runtime.partition.record import custom_functions_to, record
from schedc_runtime.partition.recorder import ForwardRecorder, Original, Recording
from schedc_runtime.partition.records import Records, device_of_record
from schedc_runtime.partition.split import CutRecording, Entries
from schedc_runtime.row_flow.flows import Flow, Meeting, RowPlace, tensors_of
from schedc_runtime.row_flow.probe import independent
from schedc_runtime.row_flow.watch import RowWatch

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)


class RowsOf(NamedTuple):
    """What was found of a model. meetings: those that an output or a buffer depends on, in the order of the model, each
    with its stage. outputs, crossing: where rows are in each tensor of the output, and between stages [stages - 1];
    None where a tensor has none."""

    meetings: tuple[tuple[Meeting, int], ...]
    outputs: tuple[RowPlace | None, ...]
    crossing: tuple[tuple[RowPlace | None, ...], ...]


def follow(records: Records, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool) -> RowsOf:
    """Where rows meet in a model. args, kwargs: of one microbatch, [rows, ...] a `TensorSpec` may replace a tensor.

    Raises what a recording raises where the model does not run on other numbers of rows.
    """
    named = named_arguments(records.model, args, kwargs, records.inputs)
    first: RowWatch | None = None
    for rows in _two_primes(records.model, named):
        fields = pytree.tree_map(partial(_with_rows, rows), dict(named), is_leaf=_is_spec)
        watching = _Watching(records.model, named, rows, first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # earlier recordings have given these warnings
            recording = record(
                records.model, fields, records.rule, training=training, device=device_of_record(records.model),
                around=watching.around,
            )  # fmt: skip
        first = watching.watch
    return _found(records, recording, first)


def _found(records: Records, recording: Recording, watch: RowWatch | None) -> RowsOf:
    assert watch is not None
    last = watch

    def flow(node: Any) -> Flow:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        return last.of(value) if isinstance(value, Tensor) else Flow()

    entries = Entries.of(recording, records.wanted)
    begins = entries.stages(records.cuts)
    (leaves,) = next(node for node in recording.graph.nodes if node.op == "output").args
    outputs = [flow(leaf) for leaf in leaves if isinstance(leaf, fx.Node)]
    reached = sorted(watch.written.union(*(each.met for each in outputs)))
    meetings = [watch.meetings[number] for number in reached]
    crossing = CutRecording(recording, begins).crossing
    return RowsOf(
        tuple((meeting, sum(meeting.position >= begin for begin in begins)) for meeting in meetings),
        tuple(each.layout for each in outputs),
        tuple(tuple(flow(node).layout for node in nodes) for nodes in crossing),
    )


@dataclass
class _RunningModule:
    """A call of a module that runs. met, assumed: numbers of meetings and of assumed modules before it."""

    path: str
    met: int
    assumed: int


class _Watching:
    """What is put around the recording of one run."""

    def __init__(self, model: nn.Module, named: Mapping[str, Any], rows: int, first: RowWatch | None) -> None:
        self.model, self.named, self.rows, self.first = model, named, rows, first
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.frames: list[_RunningModule] = []
        self.trying = False

    @contextmanager
    def around(self, recorder: ForwardRecorder, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Follow the rows of ``inputs`` through what runs inside."""
        self.recorder, self.plain, self.frames = recorder, recorder.call, [_RunningModule("", 0, 0)]
        nodes = recorder.recording.graph.nodes
        self.watch = RowWatch(self.rows, self.first, lambda: len(nodes), lambda: self.frames[-1].path)
        self.watch.enter_state(
            (f"{name}.{key}" if name else key, tensor)
            for name, module in self.model.named_modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        )
        leaves = pytree.tree_leaves(dict(inputs)), pytree.tree_leaves(dict(self.named), is_leaf=_is_spec)
        for leaf, spec in zip(*leaves, strict=True):
            if isinstance(leaf, Tensor):
                self.watch.enter(leaf, None if (dim := _rows_dim(spec)) is None else RowPlace(dim))
        with ExitStack() as stack:
            stack.enter_context(custom_functions_to(self._apply))
            recorder.call, hook = self._call, recorder.hook  # type: ignore[method-assign]
            recorder.hook = partial(self._hook_between, hook)  # type: ignore[method-assign]
            stack.enter_context(_Hooks(self._hook))
            stack.enter_context(self.watch)
            yield

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], original: Original) -> Any:
        if self.trying:
            return original(module, *args, **kwargs)
        path = self.paths.get(id(module), self.frames[-1].path)
        assumed = self.recorder.recording.assumed
        frame = _RunningModule(path, len(self.watch.meetings), len(assumed))
        self.frames.append(frame)
        try:
            result = self.plain(module, args, kwargs, original)
        finally:
            self.frames.pop()
        self.watch.behind(path)
        if self.first is not None:
            self._judge(frame, module, (args, kwargs), original, result, path in assumed[frame.assumed :])
        return result

    def _judge(
        self, frame: _RunningModule, module: nn.Module, given: tuple[Any, Any], original: Original, result: Any,
        assumed: bool,
    ) -> None:  # fmt: skip
        """Try a module out on values where its operators do not say whether rows meet."""
        watch = self.watch
        results = list(tensors_of(result))
        new = {number for each in results for number in watch.of(each).met if number >= frame.met}
        if not results or not (assumed or new) or any(watch.meetings[number].certain for number in new):
            return
        taken = list(tensors_of(given))
        before = frozenset().union(*(watch.of(each).met for each in taken)) if taken else frozenset()
        flows = {id(each): watch.of(each) for each in taken}
        self.trying = True
        try:
            layouts = independent(partial(original, module), module, *given, flows, results, self.rows)
        finally:
            self.trying = False
        if layouts is not None:
            for each, layout in zip(results, layouts, strict=True):
                watch.set(each, Flow(layout, before))
        elif assumed:
            first = next((flow.layout for flow in flows.values() if flow.layout is not None), None)
            met = before | {watch.meet(f"what `{frame.path}` does depends on values", certain=False)}
            for each in results:
                watch.set(each, Flow(first, met))

    def _apply(self, kind: Any, apply: Original, args: tuple[Any, ...]) -> Any:
        """A function with a backward of its own: its gradients are followed, too."""
        result = apply(*args)
        if self.trying:
            return result
        inputs = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        outputs = [x for x in tensors_of(result) if x.requires_grad and x.grad_fn is not None]
        if inputs and outputs:
            self._backward(kind.__name__, inputs, outputs)
        return result

    def _backward(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        watch = self.watch
        grads = [torch.empty_like(output) for output in outputs]
        for grad, output in zip(grads, outputs, strict=True):
            watch.set(grad, Flow(watch.of(output).layout))
        try:
            with torch._C.DisableTorchFunction():
                found = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
        except Exception:
            watch.written |= {watch.meet(f"the backward of `{name}` could not be followed", certain=False)}
            return
        for each, source in zip(found, inputs, strict=True):
            if each is not None:
                self._gradient(f"the backward of `{name}`", each, source)

    def _gradient(self, what: str, gradient: Tensor, source: Tensor) -> None:
        flow = self.watch.of(gradient)
        self.watch.written |= flow.met
        if flow.layout is not None and flow.layout != self.watch.of(source).layout:
            self.watch.written |= {self.watch.meet(f"{what} moves rows")}

    def _hook_between(self, register: Callable[[Tensor, Any], Any], tensor: Tensor, hook: Any) -> Any:
        self._hook(tensor, hook)
        return register(tensor, hook)

    def _hook(self, tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        """A hook of a tensor's gradient."""
        if self.trying or not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return
        gradient = torch.empty_like(tensor)
        self.watch.set(gradient, Flow(self.watch.of(tensor).layout))
        with torch.no_grad(), torch._C.DisableTorchFunction():
            changed = hook(gradient)
        if isinstance(changed, Tensor):
            self._gradient("a hook of a tensor", changed, tensor)


class _Hooks(TorchFunctionMode):
    """Tells of hooks of tensors."""

    def __init__(self, tell: Callable[[Tensor, Any], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and len(args) == 2:
            self.tell(*args)
        return func(*args, **(kwargs or {}))


def _two_primes(model: nn.Module, named: Mapping[str, Any]) -> list[int]:
    """Two numbers of rows that divide no other size."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    for leaf in pytree.tree_leaves(dict(named), is_leaf=_is_spec):
        if isinstance(leaf, (Tensor, TensorSpec)):
            sizes.update(size for dim, size in enumerate(leaf.shape) if dim != _rows_dim(leaf))
    free = [prime for prime in _PRIMES if all(size % prime for size in sizes)]
    return (free if len(free) > 1 else list(_PRIMES))[:2]


def _rows_dim(leaf: Any) -> int | None:
    """The dimension of the rows in a leaf of a batch; None where it has none."""
    if not isinstance(leaf, (Tensor, TensorSpec)) or not leaf.shape:
        return None
    dim: int | None = getattr(leaf, "rows", 0)
    return dim


def _with_rows(rows: int, leaf: Any) -> Any:
    """A leaf of a batch with another number of rows."""
    if (dim := _rows_dim(leaf)) is None:
        return leaf
    shape = (*leaf.shape[:dim], rows, *leaf.shape[dim + 1 :])
    return TensorSpec(shape, leaf.dtype, known=getattr(leaf, "known", None))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, TensorSpec)
