"""Leaves a head out of a recording: the model then returns the hidden states that the head would have multiplied.

hidden -> [lm_head] -> float -> / 30 -> logits        recorded
hidden -> HeadInput(hidden, after=float -> / 30)      what the last stage returns in the logits' place
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.recorder import Recording
from schedc_runtime.partition.structure import Template
from schedc_runtime.partition.symbols import NotSymbolic, has_sizes
from schedc_runtime.partition.unit_calls import compiled_code

BY_ELEMENT = frozenset(
    ("float", "double", "half", "bfloat16", "to", "mul", "multiply", "__mul__", "__rmul__", "div", "divide",
     "true_divide", "__truediv__", "tanh", "contiguous")
)  # fmt: skip
"""Names of the functions that may stand between the head and the model's output: they work element by element."""
_REMEDY = "give the pipeline a loss function of logits, loss_fn(output, targets), in place of a ChunkedLoss"


class HeadInput(NamedTuple):
    """What stands in the model's output in the place of the logits.

    hidden: [..., H] the head's input.
    after: [..., V] -> [..., V] what the model does with the logits; None for nothing.
    """

    hidden: Tensor
    after: Callable[[Tensor], Tensor] | None


pytree.register_pytree_node(
    HeadInput,
    lambda value: ([value.hidden], value.after),
    lambda parts, after: HeadInput(next(iter(parts)), after),
    serialized_type_name=f"{__name__}.HeadInput",
)


@dataclass(frozen=True)
class _InPlaceOfLogits:
    """Makes a `HeadInput` of its only part."""

    after: Callable[[Tensor], Tensor] | None

    def build(self, values: list[Any]) -> HeadInput:
        return HeadInput(values[0], self.after)


def check_head(model: nn.Module, head: str) -> None:
    """Raise `PartitionError` unless ``head`` names a linear layer that can be left out."""
    names = dict(model.named_modules())
    if head not in names or not head:
        linear = [name for name, module in names.items() if isinstance(module, nn.Linear)]
        raise PartitionError(
            f"the head `{head}` is no submodule of {type(model).__name__}",
            f"name the layer that makes the logits; linear layers: {', '.join(linear[-6:]) or 'none'}",
        )
    module = names[head]
    if type(module).forward is not nn.Linear.forward or not isinstance(module, nn.Linear):
        raise PartitionError(
            f"the head `{head}` is a {type(module).__name__}, which need not multiply as an nn.Linear does", _REMEDY
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise PartitionError(
            f"the head `{head}` has hooks, and a loss in chunks does not call it", f"remove them, or {_REMEDY}"
        )


def leave_out(recording: Recording, head: str) -> None:
    """Replace the call of ``head`` by its input, and the logits in the output by a `HeadInput`.

    Raises `PartitionError` where the logits are used for anything else.
    """
    call = _call_of(recording, head)
    tail = list(_tail(recording, call, head))
    last = tail[-1] if tail else call
    (output,) = (node for node in recording.graph.nodes if node.op == "output")
    places = [place for place, leaf in enumerate(output.args[0]) if leaf is last]
    if len(places) != 1:
        raise _used_elsewhere(head, f"the model's output has the logits {len(places)} times")
    hidden = call.args[0]
    assert isinstance(hidden, fx.Node)
    assert recording.output is not None
    if any(map(has_sizes, tail)):
        raise NotSymbolic("a size is in what the model does with its logits")
    after = _function(tail, call) if tail else None
    recording.output = _with_leaf(recording.output, places[0], Template(_InPlaceOfLogits(after), (Template(None, ()),)))
    last.replace_all_uses_with(call)
    for node in reversed(tail):
        recording.graph.erase_node(node)
    removed = set(tail)
    recording.entries = [(name, call if before in removed else before) for name, before in recording.entries]
    recording.calls = [each for each in recording.calls if each is not call]
    recording.head = head
    call.op, call.target, call.args, call.kwargs = "call_function", head_input, (hidden,), {}
    call.meta = {"val": hidden.meta["val"], "draws": ()}


def head_input(hidden: Tensor) -> Tensor:
    """[..., H] the input of a head that was left out."""
    return hidden


def _call_of(recording: Recording, head: str) -> fx.Node:
    """The only call of the head."""
    calls = [call for call in recording.calls if call.target == head]
    if len(calls) > 1:
        raise PartitionError(f"the head `{head}` is called {len(calls)} times in a forward", _REMEDY)
    if not calls:
        inside = [str(call.target) for call in recording.calls if head.startswith(f"{call.target}.")]
        why = f"it lies inside of the unit `{inside[0]}`" if inside else "the model takes its weight by value"
        remedy = "Cut(blocks=...) names other units, or " if inside else ""
        raise PartitionError(f"the head `{head}` is not called between units: {why}", remedy + _REMEDY)
    (call,) = calls
    if len(call.args) != 1 or call.kwargs or not isinstance(call.args[0], fx.Node):
        raise PartitionError(f"the head `{head}` is called with more than hidden states", _REMEDY)
    return call


def _tail(recording: Recording, call: fx.Node, head: str) -> Iterator[fx.Node]:
    """What the model does with the logits, in order, up to its output."""
    node = call
    while True:
        users = list(node.users)
        others = [user for user in users if user.op != "output"]
        if not others:
            return
        if len(users) > 1:
            raise _used_elsewhere(head, f"{_shown(others)} {'takes' if len(others) == 1 else 'take'} them, too")
        (node,) = users
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in BY_ELEMENT or node.all_input_nodes != [node.args[0]]:
            if node.op == "call_module":
                raise PartitionError(
                    f"the head `{head}` is not the last product: `{node.target}` takes its result",
                    "name the layer whose result the model returns as logits",
                )
            raise _used_elsewhere(head, f"{_shown([node])} takes them, which is not done element by element")
        yield node


def _function(tail: Sequence[fx.Node], call: fx.Node) -> Callable[[Tensor], Tensor]:
    """The nodes behind the head as a function of logits."""
    graph = fx.Graph()
    here = {call: graph.placeholder("logits")}
    for node in tail:
        here[node] = graph.node_copy(node, here.__getitem__)
    graph.output(here[tail[-1]])
    run = compiled_code(graph, "logits").run
    return lambda logits: run(None, logits)


def _used_elsewhere(head: str, how: str) -> PartitionError:
    return PartitionError(f"the model uses the logits of `{head}` elsewhere: {how}", _REMEDY)


def _shown(nodes: Sequence[fx.Node]) -> str:
    names = [getattr(node.target, "__name__", str(node.target)) for node in nodes]
    return " and ".join(f"`{name}`" for name in names)


def _with_leaf(template: Template, place: int, leaf: Template) -> Template:
    """A template with another one in the place of its leaf number ``place``."""
    if template.like is None:
        return leaf
    inner = list(template.inner)
    for index, part in enumerate(inner):
        leaves = _leaves(part)
        if place < leaves:
            inner[index] = _with_leaf(part, place, leaf)
            break
        place -= leaves
    return template._replace(inner=tuple(inner))


def _leaves(template: Template) -> int:
    return 1 if template.like is None else sum(map(_leaves, template.inner))
