"""Records the construction of a model: every tensor is made on the meta device, and every operation goes on a tape.

    with schedc_runtime.deferred():
        model = make_model()

Python runs for real. Values that follow from the code alone, as those of ``torch.linspace(...).tolist()``, are worked
out when they are read. A value that follows from random numbers is refused: it is not known before the seed is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import MaterializeError
from schedc_runtime.materialize.replay import make, without_draws
from schedc_runtime.materialize.tape import TAPES, Captured, Operation, Tape, View, forget_dead, tape_of
from schedc_runtime.partition.user_line import user_line

_META = torch.device("meta")
_WHOLE = ((torch.nn.init, "_no_grad_trunc_normal_"),)
"""Functions that draw until their values fit, by module and name: each is recorded as one operation."""

_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
"""Methods that need values and are no operators."""
_IS_META, _DEVICE = torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]


DEFERRED: WeakSet[nn.Module] = WeakSet()
"""Modules that were constructed inside of `deferred`: their tensors have a recording, or were converted behind it."""

_REGISTRATIONS = (register_module_parameter_registration_hook, register_module_buffer_registration_hook)


@contextmanager
def deferred(device: torch.device | str | None = None) -> Iterator[None]:
    """Constructs models on the meta device and records how, for `Pipeline.materialize`.

    device: where the tensors will be; by default the pipeline decides. Conversions, such as ``model.to(bfloat16)``,
    belong inside, too.
    """
    if any(isinstance(mode, _Recorder) for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()):
        raise MaterializeError("deferred() inside of deferred()", "one of them is enough: leave the inner one out")
    forget_dead()
    tape = Tape(None if device is None else torch.device(device))
    TAPES.append(tape)
    handles = [register(_note) for register in _REGISTRATIONS]
    try:
        with recording(tape):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _note(module: nn.Module, name: str, tensor: Any) -> None:
    DEFERRED.add(module)


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Puts what is done inside on ``tape``."""
    before = [(module, name, getattr(module, name)) for module, name in _WHOLE]
    for module, name, function in before:
        setattr(module, name, _recorded_whole(tape, function))
    try:
        with _Values(tape), _Recorder(tape):
            yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every new tensor to the meta device, and puts on the tape what makes or changes a meta tensor."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # meta kernels shall see the tensors as they are
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        creates = any(argument.name == "device" for argument in func._schema.arguments)
        if not any(t.is_meta for t in tensors) and (tensors or not creates):
            for tensor in written(func, args, kwargs):
                self.tape.release(tensor)
            return func(*args, **kwargs)
        if _gives_value(func) or any(not t.is_meta for t in written(func, args, kwargs)):
            return func(*_known((args, kwargs))[0], **kwargs)
        return self._record(func, tuple(args), kwargs, creates)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], creates: bool) -> Any:
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if creates and (
            device is not None or not any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs)))
        ):
            kwargs["device"] = _META
        kwargs = gpu.pageable(kwargs)
        saved_args, saved_kwargs = pytree.tree_map(self._saved, (args, kwargs))
        saved_kwargs.pop("generator", None)
        views = [leaf for leaf in _leaves((saved_args, saved_kwargs)) if isinstance(leaf, View)]
        before = {view.storage for view in views}
        changed = [self.tape.view(tensor) for tensor in written(func, args, kwargs)]
        try:
            result = func(*pytree.tree_map(_on_meta, args), **pytree.tree_map(_on_meta, kwargs))
        except NotImplementedError:  # its shape depends on values
            known_args, known_kwargs = _known((args, kwargs))
            return func(*known_args, **known_kwargs | ({"device": device} if device is not None else {}))
        leaves = pytree.tree_leaves(result)
        outputs = tuple([self.tape.view(x) if isinstance(x, Tensor) else None for x in leaves])
        new = tuple([view if view is not None and view.storage not in before else None for view in outputs])
        changed += [view for view in new if view is not None]
        if changed:
            draws = torch.Tag.nondeterministic_seeded in func.tags
            place = None if device is None or device.type == "meta" else device
            operation = Operation(func, saved_args, saved_kwargs, new, self.tape.reads(views), draws, place)
            self.tape.append(operation, changed)
        return result

    def _saved(self, leaf: Any) -> Any:
        """An argument as the tape keeps it."""
        if not isinstance(leaf, Tensor):
            return leaf
        return self.tape.adopt(leaf) if leaf.is_meta else self.tape.capture(leaf)


class _Values(TorchFunctionMode):
    """Works out the values that are read by methods that are no operators, and hides the meta device.

    Initialisers return early for a meta tensor. Here they shall run.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func == _IS_META and self.tape.knows(args[0]):
            return False
        if func == _DEVICE and args[0].is_meta and self.tape.knows(args[0]):
            return self.tape.device or torch.get_default_device()
        if func in _READS:
            args, kwargs = _known((tuple(args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _recorded_whole(tape: Tape, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(tensor, ...)``, which writes ``tensor``: for a tensor of the tape, records one operation instead."""

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tape.knows(tensor):
            return function(tensor, *args, **kwargs)
        view = tape.view(tensor)
        kwargs.pop("generator", None)
        plain = tuple([arg for arg in args if not isinstance(arg, torch.Generator)])
        tape.append(Operation(function, (view, *plain), kwargs, (), tape.reads([view]), random=True), [view])
        return tensor

    return record


def _known(tree: Any) -> Any:
    """The arguments with real tensors in place of meta tensors. Raises `MaterializeError` if they are random."""

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta or (tape := tape_of(leaf)) is None:
            return leaf
        view = tape.view(leaf)
        if without_draws(tape, view):
            raise MaterializeError(
                f"the construction reads a value that follows from random numbers{user_line()}",
                "torch draws when `materialize` is called: decide by Python's `random`, or leave this out and give the"
                " values by `pipe.materialize(init=...)`",
            )
        return make(tape, view, torch.device("cpu"), lambda _: 0)

    return pytree.tree_map(value, tree)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors [...] among the arguments that an operator writes."""
    if not func._schema.is_mutable:
        return []
    values = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _on_meta(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, View | Captured))


def _gives_value(func: Any) -> bool:
    """Whether an operator gives a plain value that depends on the elements, as ``item`` and ``allclose`` do."""
    kinds = {str(result.type) for result in func._schema.returns}
    return bool(kinds) and kinds <= {"bool", "int", "float", "number"} and not func._opname.startswith(("sym_", "is_"))
