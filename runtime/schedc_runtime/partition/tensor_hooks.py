"""What code between units does to tensors besides computing: hooks become nodes, other effects are refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.structure import closure_values, tensors_in
from schedc_runtime.partition.user_line import user_line

BESIDE = "beside"
"""Key in the meta of a node that runs in the stage of another node: the other node."""
Hook = Callable[[Tensor], Tensor | None]
_INSIDE = "do this inside of a unit, whose code runs for each microbatch"
_EFFECTS: dict[Any, tuple[str, str]] = {
    Tensor.retain_grad: ("retain_grad()", "keep the gradient by a hook: x.register_hook(kept.append)"),
    Tensor.register_post_accumulate_grad_hook: (
        "register_post_accumulate_grad_hook()",
        "register it once on the parameter, outside of the forward",
    ),
    Tensor.backward: ("backward()", _INSIDE),
    torch.autograd.backward: ("torch.autograd.backward()", _INSIDE),
    torch.autograd.grad: ("torch.autograd.grad()", f"{_INSIDE}: a stage knows nothing of what other stages compute"),
    Tensor.detach_: ("detach_()", "write x = x.detach()"),
}
"""What is refused between units, with its name and a remedy."""


_ONCE = frozenset({"clamp_", "clamp_min_", "clamp_max_", "clip_", "copy_", "fill_", "zero_", "__setitem__"})
"""Writes that change nothing when they are done again."""


def refuse_effect(func: Any) -> None:
    """Raise `PartitionError` for a torch function whose effect is no result, and which a recording would lose."""
    if func in _EFFECTS:
        name, remedy = _EFFECTS[func]
        raise PartitionError(f"`{name}` is called between units{user_line()}", remedy)


def refuse_written(parameters: Mapping[int, str], storages: Iterable[int], node: fx.Node) -> None:
    """Raise `PartitionError` for a change of a parameter between units that every microbatch would make again.

    parameters: names by storage. storages: those to which ``node`` writes.
    """
    done = getattr(node.target, "__name__", str(node.target))
    if (name := next((parameters[s] for s in storages if s in parameters), "")) and done not in _ONCE:
        raise PartitionError(
            f"`{done}` writes to the parameter `{name}` between units: every microbatch would do it again{user_line()}",
            "write to parameters outside of the forward, or turn this off. RWKV scales its weights in an evaluation,"
            " unless config.rescale_every is 0",
        )


def hooked_code(tensor: Tensor, hook: Hook) -> None:
    """Register a hook on ``tensor`` [...], if it has a gradient: an evaluation has none."""
    if tensor.requires_grad:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


class TensorHooks:
    """The hooks of one recording."""

    def __init__(self) -> None:
        self._nodes: list[tuple[fx.Node, dict[int, Hook]]] = []

    def add(self, node: fx.Node, source: fx.Node, hook: Hook) -> RemovableHandle:
        """``node`` registers ``hook`` on the tensor of ``source``. The handle removes the node while it is recorded."""
        if source.op == "get_attr":
            raise PartitionError(
                f"a hook is registered on `{source.target}` between units: each microbatch would register one"
                f" more{user_line()}",
                "register it once, outside of the forward",
            )
        if any(True for _ in _kept(hook, 0)):
            raise PartitionError(
                f"a hook keeps a tensor, or a gradient function, of the forward that is recorded{user_line()}",
                "let the hook read parameters and buffers from their module when it runs. What else it needs is made by"
                " a torch.autograd.Function with a backward of its own",
            )
        node.meta |= {BESIDE: source, "line": user_line()}
        registered: dict[int, Hook] = OrderedDict()
        handle = RemovableHandle(registered)
        registered[handle.id] = hook
        self._nodes.append((node, registered))
        return handle

    def finish(self, graph: fx.Graph) -> None:
        """Drop the nodes of the hooks that the forward has removed again."""
        for node, registered in self._nodes:
            if not registered:
                graph.erase_node(node)


class GradientFunction:
    """A tensor's ``grad_fn`` between units: every attribute except hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def register_hook(self, _hook: Any) -> NoReturn:
        """Refuse the hook: the graph of a recording is not that of a step."""
        raise PartitionError(
            f"a hook is registered on a gradient function between units{user_line()}",
            "register it on the tensor: x.register_hook(hook). Backward hooks of modules belong to units",
        )

    register_prehook = register_hook


_GRAD_FN = Tensor.grad_fn


def shown_hook(func: Any, value: Any) -> Any:
    """What code between units gets of a torch function that returns no tensor."""
    if value is not None and getattr(func, "__self__", None) is _GRAD_FN:
        return GradientFunction(value)
    return value


def _kept(value: Any, depth: int) -> Iterator[Any]:
    """What a hook keeps of the forward that is recorded: fake tensors and gradient functions."""
    if isinstance(value, (FakeTensor, GradientFunction)):
        yield value
    elif depth < 4 and not isinstance(value, (nn.Module, type)):
        inner = closure_values(value)
        inner += [
            *(getattr(value, "__defaults__", None) or ()),
            *(getattr(value, "__kwdefaults__", None) or {}).values(),
        ]
        inner += [value.func, value.args, value.keywords] if isinstance(value, partial) else []
        inner += [getattr(value, "__self__", None), getattr(value, "__dict__", None)]
        inner += tensors_in(value)
        inner += list(value.values()) if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
        for part in inner:
            yield from _kept(part, depth + 1)
