"""Refuses a model that lets rows of a sequence meet between its cores, where each rank has its own rows alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, fx, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.ranks.exchange import RoutingLayer
from schedc_runtime.tensor_parallel.exchanges import ROWS, OwnColumns, TensorExchange

ROW_BY_ROW = frozenset({
    "add", "sub", "mul", "div", "true_divide", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "abs", "clamp",
    "tanh", "sigmoid", "relu", "gelu", "silu", "dropout", "rms_norm", "layer_norm",
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "getattr", "after",
    "__add__", "__radd__", "__mul__", "__rmul__", "__sub__", "__rsub__", "__truediv__", "__rtruediv__",
    "__iadd__", "__imul__", "add_", "mul_",
})  # fmt: skip
"""Functions of torch that compute each element, or each row, by itself."""
OWN_ROWS = "own_rows"
"""Key in the meta of a node whose rows follow each from itself: by each of its inputs, whether it has own rows, too."""
_SIZE = 4
"""Rows with which a module is tried."""

_GETITEM, _ALL = ("getitem", "__getitem__"), (slice(None), slice(0, None))


def refuse_meeting_rows(
    graph: fx.Graph, inside: Collection[fx.Node], modules: Mapping[str, nn.Module], cores: Collection[str]
) -> None:
    """Raise `PartitionError` for a node between cores that may let rows [batch, rows, width] meet.

    Functions are known by name. A module is tried on random rows: a row must change nothing of another one.
    """
    opened = tuple(f"{path}." for path in cores)
    within: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in inside:
            continue
        if node.op == "output":
            raise PartitionError(
                "the model returns something between its cores, of which each tensor rank has its own part",
                "return what the head gives, and what does not come from cores",
            )
        if any(draw.active for draw in node.meta.get("draws", ())):
            raise PartitionError(
                f"`{getattr(node.target, '__name__', node.target)}` draws random numbers where each tensor rank has"
                " its own rows or heads: all ranks would draw the same",
                "set dropout to 0, or take one tensor rank for this model",
            )
        target = str(node.target)
        module = modules[target] if node.op == "call_module" else None
        name = type(module).__name__ if isinstance(module, TensorExchange) else ""
        if name == "Gather" or (name != "Scatter" and any(source in within for source in node.all_input_nodes)):
            within.add(node)  # whole rows, up to the scatter
            continue
        apart = isinstance(module, (TensorExchange, OwnColumns, RoutingLayer))
        if apart or target in cores or target.startswith(opened):
            continue
        if not (_is_row_by_row(node, inside) if module is None else keeps_rows_apart(module, node)):
            what = f"`{target}`" if module is not None else f"the function `{getattr(node.target, '__name__', target)}`"
            raise PartitionError(
                f"{what} may let rows of a sequence meet between the cores of the plan of styles, where each tensor"
                f" rank has its own rows alone{node.meta.get('line', '')}",
                "move it into a core, or take one tensor rank for this model",
            )
        node.meta[OWN_ROWS] = tuple(source in inside for source in node.all_input_nodes)


def _is_row_by_row(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether a function gives rows of which each follows from its own row."""
    if node.op != "call_function":
        return node.op == "get_attr"
    name = getattr(node.target, "__name__", "")
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    whole = [source.meta.get("val") for source in node.all_input_nodes if source not in inside]
    if any(isinstance(each, Tensor) and each.dim() > 1 and each.shape[-2] != 1 for each in whole):
        return False  # a value for each row, as of positions: those of the first rows on every rank
    given: Any = node.args
    if name in ("layer_norm", "rms_norm"):
        shape: Any = given[1] if len(given) > 1 else node.kwargs["normalized_shape"]
        return len(shape) == 1
    if name in _GETITEM and isinstance(given[0].meta.get("val"), Tensor) and not _takes_all_rows(given[1]):
        return "part_of" in node.meta
    shapes = [tuple(each.shape) for each in sources if isinstance(each, Tensor) and each.dim() > ROWS]
    value = node.meta.get("val")
    if name in (*_GETITEM, "mean", "sum", "unsqueeze", "expand"):
        if name in ("mean", "sum"):
            dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
            return dims in (-1, (-1,), [-1])
        return not isinstance(value, Tensor) or tuple(value.shape) in shapes or "part_of" in node.meta
    return name in ROW_BY_ROW


def _takes_all_rows(index: Any) -> bool:
    """Whether an index leaves batch and rows as they are."""
    first = (index if isinstance(index, tuple) else (index,))[:2]
    return all(each is Ellipsis or (isinstance(each, slice) and each in _ALL) for each in first)


def keeps_rows_apart(module: nn.Module, node: fx.Node) -> bool:
    """Whether a row of the first argument of a module changes no other row of its result."""
    taken = [source.meta.get("val") for source in node.all_input_nodes]
    if len(taken) != 1 or not isinstance(taken[0], Tensor) or taken[0].dim() <= ROWS:
        return False
    shape = [int(size) for size in taken[0].shape]
    shape[0], shape[ROWS] = 1, _SIZE
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        tried = copy_to_try(module)  # statistics of the trial are not kept
        device = next((p.device for p in tried.parameters()), torch.device("cpu"))
        rows = torch.randn(shape, dtype=taken[0].dtype, device=device)
        other = rows.clone()
        other[:, 1] = torch.randn_like(other[:, 1])
        try:
            first, second, rolled = tried(rows), tried(other), tried(rows.roll(1, ROWS))
        except Exception:
            return False
    same: Any = isinstance(first, Tensor) and first.shape[:2] == rows.shape[:2]
    return bool(
        same
        and torch.equal(first[:, [0, 2, 3]], second[:, [0, 2, 3]])
        and torch.allclose(first.roll(1, ROWS), rolled, rtol=1e-2, atol=1e-2)  # of any position
    )


def copy_to_try(module: nn.Module) -> nn.Module:
    """A copy of a module; of one on the meta device on the CPU, with drawn parameters and buffers of zeros."""
    tried = deepcopy(module)
    if any(parameter.is_meta for parameter in tried.parameters()):
        tried.to_empty(device="cpu")
        for parameter in tried.parameters():
            parameter.normal_()
        for buffer in tried.buffers():
            buffer.zero_()
    return tried
