"""The table of fusions as the runtime carries it out: patterns of each row, when they hold, and what runs instead.

`schedc.model.fusions` has what the compiler knows of the same rows: bytes, and whether bits are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from schedc.ir.plan import Level
from schedc.model.fusions import FUSIONS
from schedc_runtime.device.choice import device_for
from schedc_runtime.fusion.functions import BiasGelu, DropoutAdd, Gated, Rotary
from schedc_runtime.fusion.patterns import Match, Pattern
from schedc_runtime.kernels.norm import normalised
from schedc_runtime.recompute.regions import region

Replacement = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and its arguments: nodes and constants."""


@dataclass(frozen=True)
class Rewrite:
    """A way in which a row occurs. holds: whether the values of a match are such that `replacement` may run.

    columns: number of columns of a match, as the table counts them. replacement(match, compiled): what runs.
    """

    row: str
    pattern: Pattern
    holds: Callable[[Match], bool]
    columns: Callable[[Match], int]
    replacement: Callable[[Match, bool], Replacement]

    def saved_bytes(self, match: Match) -> int:
        """Bytes that the match no longer holds."""
        value = tensor(match.result)
        rows = value.numel() // value.shape[-1]
        if self.row == "gqa":
            rows = value.shape[0] * value.shape[-2]  # all heads of a token
        on_cpu = value.device.type == "cpu"
        return rows * FUSIONS[self.row].saved_bytes(self.columns(match), value.element_size(), on_cpu)


def tensor(node: Any) -> Tensor:
    """The fake result [...] of a node."""
    value: Tensor = node.meta["val"]
    return value


def _tensors(match: Match, *names: str) -> list[Tensor] | None:
    nodes = [match.values[name] for name in names]
    if not all(isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor) for node in nodes):
        return None
    return [tensor(node) for node in nodes]


def _alike(match: Match, *names: str) -> bool:
    """Whether these are tensors of the shape and dtype of the result."""
    own = tensor(match.result)
    values = _tensors(match, *names)
    return values is not None and all(x.shape == own.shape and x.dtype == own.dtype for x in values)


def _last(match: Match) -> int:
    return int(tensor(match.result).shape[-1])


def _of(match: Match, *names: str) -> tuple[Any, ...]:
    return tuple(match.values[name] for name in names)


# Rotary positions.


def _rope(x: Any, cos: Any, sin: Any, front: Any, back: Any) -> Any:
    return x * cos + torch.cat((-x[back], x[front]), dim=-1) * sin


def _turns(match: Match) -> bool:
    """Whether front and back are the halves of the columns, and cos and sin need no gradient."""
    values = _tensors(match, "cos", "sin")
    if values is None or not _alike(match, "x"):
        return False
    half, odd = divmod(_last(match), 2)
    front, back = _of(match, "front", "back")
    halves = [(Ellipsis, slice(None, half)), (Ellipsis, slice(half, None))]
    return (
        not odd
        and [front, back] == halves
        and all(x.dtype == tensor(match.result).dtype and not x.requires_grad for x in values)
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor, compiled: bool) -> Tensor:
    """[..., d] `Rotary`."""
    output: Tensor = Rotary.apply(x, cos, sin, compiled)  # type: ignore[no-untyped-call]
    return output


# Gates and gelus. They are regions of the level `act`, as activation functions are.


def _gated(gate: Any, up: Any) -> Any:
    return functional.silu(gate) * up


def gated_rows(gate: Tensor, up: Tensor, compiled: bool) -> Tensor:
    """[..., F] `Gated`."""
    output: Tensor = region(Level.ACT, partial(_apply, Gated), gate, up, compiled)
    return output


def _gelu_tanh(x: Any, root: Any, cube: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(root * (x + cube * torch.pow(x, 3.0))))


def _is_tanh(match: Match) -> bool:
    root, cube = _of(match, "root", "cube")
    return _alike(match, "x") and _near(root, math.sqrt(2 / math.pi)) and _near(cube, 0.044715)


def _gelu_erf(x: Any, root: Any) -> Any:
    return x * 0.5 * (1.0 + torch.erf(x / root))


def _is_erf(match: Match) -> bool:
    return _alike(match, "x") and _near(match.values["root"], math.sqrt(2))


def _near(value: Any, wanted: float) -> bool:
    return isinstance(value, float) and math.isclose(value, wanted, rel_tol=1e-6)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """[..., F] torch's gelu, which holds x alone."""
    output: Tensor = region(Level.ACT, partial(functional.gelu, approximate=approximate), x)
    return output


def _bias_gelu(x: Any, bias: Any, approximate: Any) -> Any:
    return functional.gelu(x + bias, approximate=approximate)


def _is_biased(match: Match) -> bool:
    """Whether one of the two is a row that is added to all; it may be written first."""
    values = _tensors(match, "x", "bias")
    if values is None or not isinstance(match.values["approximate"], str):
        return False
    if values[0].dim() == 1:
        match.values["x"], match.values["bias"] = match.values["bias"], match.values["x"]
        values.reverse()
    own = tensor(match.result)
    return (
        values[0].shape == own.shape
        and own.dim() > 1
        and values[1].shape == own.shape[-1:]
        and all(x.dtype == own.dtype for x in values)
    )


def bias_gelu(x: Tensor, bias: Tensor, approximate: str, compiled: bool) -> Tensor:
    """[..., F] `BiasGelu`."""
    output: Tensor = region(Level.ACT, partial(_apply, BiasGelu), x, bias, approximate, compiled)
    return output


def _apply(kind: Any, *args: Any) -> Any:
    return kind.apply(*args)


# Norms. They are looked at inside of a module, whose weight stays its own.


def _rms_norm(x: Any, eps: Any, dtype: Any, weight: Any) -> Any:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)


def _raised_rms_norm(x: Any, wide: Any, eps: Any, dtype: Any, weight: Any) -> Any:
    return _rms_norm(x.to(wide), eps, dtype, weight)


def _normalises(match: Match) -> bool:
    """Whether sums are formed in the type in which the operation forms them, and only the weight comes behind."""
    values, own = _tensors(match, "x", "weight"), tensor(match.result)
    if values is None or not _alike(match, "x"):
        return False
    eps, dtype = _of(match, "eps", "dtype")
    return (
        values[1].shape == own.shape[-1:]
        and values[1].dtype == own.dtype == dtype
        and match.values.get("wide", own.dtype) == torch.promote_types(own.dtype, torch.float32)
        and isinstance(eps, float)
    )


# Dropout and the residual sum.


def _dropout_add(x: Any, rest: Any, p: Any) -> Any:
    return rest + functional.dropout(x, p, True, False)


def _drops(match: Match) -> bool:
    p = match.values["p"]
    return isinstance(p, float) and 0 < p < 1 and _alike(match, "x", "rest")


def dropout_add(x: Tensor, rest: Tensor, p: float, compiled: bool) -> Tensor:
    """[...] `DropoutAdd`."""
    output: Tensor = DropoutAdd.apply(x, rest, p, compiled)  # type: ignore[no-untyped-call]
    return output


# Keys and values that groups of queries share.


def _gqa(
    query: Any, key: Any, value: Any, mask: Any, p: Any, causal: Any, scale: Any, index: Any,
    wide: Any, flat: Any, wide_values: Any, flat_values: Any,
) -> Any:  # fmt: skip
    keys, values = key[index].expand(wide).reshape(flat), value[index].expand(wide_values).reshape(flat_values)
    return functional.scaled_dot_product_attention(query, keys, values, mask, p, causal, scale=scale)


def _repeats(match: Match) -> bool:
    """Whether keys and values [B, g, S, d] are repeated for heads that follow each other."""
    values = _tensors(match, "query", "key", "value")
    whole = slice(None)
    if values is None or match.values["index"] != (whole, whole, None, whole, whole):
        return False
    query, *pairs = values
    if query.dim() != 4 or any(x.dim() != 4 or query.shape[1] % x.shape[1] for x in pairs):
        return False
    if isinstance(match.values["mask"], fx.Node) and device_for(query.device).supports("masked groups"):
        return False
    for x, wide, flat in zip(pairs, ("wide", "wide_values"), ("flat", "flat_values"), strict=True):
        batch, heads, tokens, columns = x.shape
        copies = query.shape[1] // heads
        if _of(match, wide, flat) != (
            (batch, heads, copies, tokens, columns),
            (batch, heads * copies, tokens, columns),
        ):
            return False
    return bool(pairs[0].shape[1] == pairs[1].shape[1])


def _copied(match: Match) -> int:
    """Columns of the copies of a token's keys and values."""
    query, key, value = (tensor(match.values[name]) for name in ("query", "key", "value"))
    return int((query.shape[1] - key.shape[1]) * (key.shape[-1] + value.shape[-1]))


def gqa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None
) -> Tensor:
    """[B, h, S, d] attention whose kernel reads keys and values [B, g, S, d] of several heads once."""
    output: Tensor = functional.scaled_dot_product_attention(
        query, key, value, mask, p, causal, scale=scale, enable_gqa=True
    )
    return output


# Rows of tokens that are gathered for their experts.


def _permute(x: Any, index: Any) -> Any:
    return x[index]


_PRODUCTS = ("_grouped_mm", "grouped_mm", "bmm")
_SAME_ROWS = ("to", "contiguous", "unsqueeze", "view", "reshape")
"""Methods behind which the rows are still the same numbers."""


def _gathers(match: Match) -> bool:
    """Whether rows [S, H] of tokens [N, H] are gathered for products alone, which hold them for their weights."""
    values = _tensors(match, "x", "index")
    if values is None or not values[0].requires_grad:
        return False
    x, index = values
    own = x.dim() == 2 and index.dim() == 1 and index.dtype in (torch.int64, torch.int32) and len(index) > len(x)
    return own and _for_products(match.result)


def _for_products(node: fx.Node) -> bool:
    if not node.users or isinstance(node.meta.get("val"), tuple):
        return False
    return all(
        user.op in ("call_function", "call_method")
        and (
            _function(user) in _PRODUCTS
            or (_function(user) in _SAME_ROWS and tensor(user).dtype == tensor(node).dtype and _for_products(user))
        )
        for user in node.users
    )


def _function(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def permute(x: Tensor, index: Tensor) -> Tensor:
    """[S, H] the rows ``index`` [S] of x [N, H]. Where saved tensors are recorded, they are gathered again."""
    output: Tensor = region(Level.NONE, torch.Tensor.__getitem__, x, index)
    return output


_KEYS = ("query", "key", "value", "mask", "p", "causal", "scale")


@cache
def rewrites() -> tuple[Rewrite, ...]:
    """All rewrites, traced once. The larger of two that may share a node comes first."""
    return (
        Rewrite("rope", Pattern(_rope), _turns, _last, lambda m, c: (rope, (*_of(m, "x", "cos", "sin"), c))),
        Rewrite(
            "gated", Pattern(_gated), lambda m: _alike(m, "gate", "up"), _last,
            lambda m, c: (gated_rows, (*_of(m, "gate", "up"), c)),
        ),
        Rewrite("gelu_tanh", Pattern(_gelu_tanh), _is_tanh, _last, lambda m, c: (gelu, (*_of(m, "x"), "tanh"))),
        Rewrite("gelu_erf", Pattern(_gelu_erf), _is_erf, _last, lambda m, c: (gelu, (*_of(m, "x"), "none"))),
        Rewrite(
            "bias_gelu", Pattern(_bias_gelu), _is_biased, _last,
            lambda m, c: (bias_gelu, (*_of(m, "x", "bias", "approximate"), c)),
        ),
        Rewrite(
            "dropout_add", Pattern(_dropout_add), _drops, _last,
            lambda m, c: (dropout_add, (*_of(m, "x", "rest", "p"), c)),
        ),
        Rewrite("gqa", Pattern(_gqa), _repeats, _copied, lambda m, c: (gqa, _of(m, *_KEYS))),
        *(
            Rewrite(
                "rms_norm", Pattern(pattern), _normalises, _last,
                lambda m, c: (normalised, (*_of(m, "x", "weight", "eps"), True)),
            )
            for pattern in (_rms_norm, _raised_rms_norm)
        ),
        Rewrite("permute", Pattern(_permute), _gathers, _last, lambda m, c: (permute, _of(m, "x", "index"))),
    )  # fmt: skip


def matches(graph: fx.Graph, names: tuple[str, ...]) -> Iterator[tuple[Rewrite, Match]]:
    """The chains of a graph that the rows ``names`` replace. No node is in two of them."""
    taken: set[fx.Node] = set()
    rows = [rewrite for rewrite in rewrites() if rewrite.row in names]
    for node in reversed(list(graph.nodes)):
        if node in taken or not isinstance(node.meta.get("val"), Tensor):
            continue
        for rewrite in rows:
            match = rewrite.pattern.match(node)
            if match is not None and not taken & set(match.nodes) and rewrite.holds(match):
                taken |= set(match.nodes)
                yield rewrite, match
                break
