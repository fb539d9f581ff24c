"""Runs a model and its backward in long doubles (64 bits of mantissa), so that a reference has no rounding of its own.

A `Wide` tensor says float64 to torch, and has its values in numpy. Autograd records and differentiates as ever. What
moves numbers runs in torch on their bytes. What computes is in `COMPUTED`. Only a slice is a view: what is written into
it is in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Numbers = np.ndarray[Any, np.dtype[np.longdouble]]


class Wide(Tensor):
    """A float64 tensor whose numbers are long doubles. numbers: of its shape."""

    numbers: Numbers

    @staticmethod
    def __new__(cls, numbers: Numbers) -> Wide:
        made: Wide = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float64)  # type: ignore[attr-defined]
        return made

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = np.asarray(numbers, dtype=np.longdouble)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WRITTEN_OUT:
            return WRITTEN_OUT[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # results may be plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in COMPUTED:
            return COMPUTED[name](*args, **kwargs)
        if name in COPIED and (kwargs.get("dtype") or torch.float64).is_floating_point:
            return Wide(args[0].numbers.copy())
        if name in DECIDED or name in COPIED:
            return func(*pytree.tree_map(_near, args), **kwargs)
        if name in MOVED:
            return _moved(func, args, kwargs)
        raise NotImplementedError(f"{func} of long doubles")


def wide(value: Any) -> Any:
    """The numbers of a tensor; anything else as it is."""
    if isinstance(value, Wide):
        return value.numbers
    return value.detach().numpy().astype(np.longdouble) if isinstance(value, Tensor) else value


def _float64(numbers: Numbers) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(numbers, np.float64, order="C")


def _near(value: Any) -> Any:
    return torch.from_numpy(_float64(value.numbers)) if isinstance(value, Wide) else value


def _bits(value: Any) -> Any:
    return torch.from_numpy(np.asarray(value.numbers, order="C").view(SAME_SIZE)) if isinstance(value, Wide) else value


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a move of numbers, done to numbers of torch that are as long."""
    moved = func(*pytree.tree_map(_bits, args), **pytree.tree_map(_bits, kwargs))
    if isinstance(moved, Tensor):
        return Wide(moved.numpy().view(np.longdouble).copy())
    return type(moved)(Wide(each.numpy().view(np.longdouble).copy()) for each in moved)


SAME_SIZE = {16: np.complex128, 8: np.float64}[np.dtype(np.longdouble).itemsize]
"""A number of torch with as many bytes as a long double."""
MOVED = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "select", "unsqueeze", "squeeze", "cat",
    "stack", "split", "diagonal", "split_with_sizes", "index", "index_select", "gather", "repeat", "unbind", "flip",
    "embedding", "slice_backward", "select_backward", "chunk", "constant_pad_nd", "roll", "tril", "triu",
}  # fmt: skip
"""Operations that move numbers, or put zeros beside them."""
COPIED = {"_to_copy", "clone", "detach", "alias", "contiguous", "lift_fresh"}
DECIDED = {"argsort", "sort", "gt", "lt", "ge", "le", "eq", "ne", "isnan", "isinf", "argmax", "any", "all"}
"""Operations without gradients, which see the nearest float64."""


def _function(of: Callable[..., Any]) -> Callable[..., Wide]:
    """An operation of numbers alone."""
    return lambda *args, **kwargs: Wide(of(*map(wide, args), **kwargs))


def _in_place(of: Callable[..., Any]) -> Callable[..., Any]:
    """Writes the result of `of` over its first argument."""

    def change(target: Any, *args: Any, **kwargs: Any) -> Any:
        target.numbers[...] = of(target.numbers, *map(wide, args), **kwargs)
        return target

    return change


def _over(dims: Any, x: Numbers) -> Any:
    return None if dims is None or dims == [] else tuple(dims) if isinstance(dims, Sequence) else dims


def _sum(x: Numbers, dims: Any = None, keepdim: bool = False, **_: Any) -> Any:
    return x.sum(_over(dims, x), keepdims=keepdim)


def _mean(x: Numbers, dims: Any = None, keepdim: bool = False, **_: Any) -> Any:
    total = _sum(x, dims, keepdim)
    return total / (x.size // np.asarray(total).size)


def _add(x: Any, y: Any, alpha: float = 1) -> Any:
    return x + y * np.longdouble(alpha)


def _sigmoid(x: Numbers) -> Numbers:
    return 1 / (1 + np.exp(-x))


def _silu_backward(grad: Numbers, x: Numbers) -> Numbers:
    part = _sigmoid(x)
    return grad * part * (1 + x * (1 - part))


PI = np.arccos(np.longdouble(-1))
ROOT = np.sqrt(2 / PI)
CUBIC = np.longdouble(0.044715)


def _normal_part(x: Numbers) -> Numbers:
    """The normal distribution up to x, by a series of terms of one sign; all of it beyond 9 deviations."""
    near = np.clip(x, -9, 9)
    term, total = near.copy(), near.copy()
    for odd in range(3, 400, 2):
        term = term * near * near / odd
        total = total + term
        if np.all(abs(term) <= abs(total) * 2.0**-70):
            break
    return np.longdouble(1) / 2 + total * np.exp(-near * near / 2) / np.sqrt(2 * PI)


def _gelu(x: Numbers, approximate: str = "none") -> Numbers:
    if approximate == "none":
        return x * _normal_part(x)
    return x / 2 * (1 + np.tanh(ROOT * (x + CUBIC * x**3)))


def _gelu_backward(grad: Numbers, x: Numbers, approximate: str = "none") -> Numbers:
    if approximate == "none":
        return grad * (_normal_part(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * PI))
    bent = np.tanh(ROOT * (x + CUBIC * x**3))
    return grad * ((1 + bent) / 2 + x / 2 * (1 - bent**2) * ROOT * (1 + 3 * CUBIC * x**2))


def _softmax(x: Numbers, dim: int, *_: Any) -> Any:
    powers = np.exp(x - x.max(dim, keepdims=True))
    return powers / powers.sum(dim, keepdims=True)


def _softmax_backward(grad: Numbers, y: Numbers, dim: int, *_: Any) -> Numbers:
    return y * (grad - (grad * y).sum(dim, keepdims=True))


def _log_softmax(x: Numbers, dim: int, *_: Any) -> Any:
    below = x - x.max(dim, keepdims=True)
    return below - np.log(np.exp(below).sum(dim, keepdims=True))


def _log_softmax_backward(grad: Numbers, y: Numbers, dim: int, *_: Any) -> Numbers:
    return grad - np.exp(y) * grad.sum(dim, keepdims=True)


def _nll_loss(x: Wide, target: Tensor, weight: None, reduction: int, ignored: int) -> tuple[Any, Any]:
    kept = (target != ignored).numpy()
    losses = np.where(kept, -x.numbers[np.arange(len(kept)), target.clamp(min=0).numpy()], np.longdouble(0))
    count = torch.tensor(float(kept.sum()), dtype=torch.float64)
    return Wide((losses, losses.sum() / kept.sum(), losses.sum())[reduction]), count


def _nll_loss_backward(
    grad: Any, x: Wide, target: Tensor, weight: None, reduction: int, ignored: int, count: Tensor
) -> Wide:
    kept = (target != ignored).numpy()
    slopes = np.zeros_like(x.numbers)
    each = wide(grad) / (kept.sum() if reduction == 1 else 1)
    slopes[np.arange(len(kept)), target.clamp(min=0).numpy()] = np.where(kept, -each, np.longdouble(0))
    return Wide(slopes)


def _embedding_backward(grad: Wide, index: Tensor, rows: int, padding: int, *_: Any) -> Wide:
    table = np.zeros((rows, grad.shape[-1]), np.longdouble)
    np.add.at(table, index.flatten().numpy(), grad.numbers.reshape(-1, grad.shape[-1]))
    if padding >= 0:
        table[padding] = 0
    return Wide(table)


def _index_add_(target: Wide, dim: int, index: Tensor, source: Wide) -> Wide:
    assert dim == 0
    np.add.at(target.numbers, index.numpy(), source.numbers)
    return target


def _index_put_(target: Wide, indices: Any, values: Any, accumulate: bool = False, *_: Any) -> Wide:
    places = tuple(slice(None) if each is None else each.numpy() for each in indices)
    if accumulate:
        np.add.at(target.numbers, places, wide(values))
    else:
        target.numbers[places] = wide(values)
    return target


def _scatter_add_(target: Wide, dim: int, index: Tensor, source: Wide) -> Wide:
    places = list(np.indices(index.shape))
    places[dim] = index.numpy()
    np.add.at(target.numbers, tuple(places), source.numbers[tuple(map(slice, index.shape))])
    return target


def _scatter_(target: Wide, dim: int, index: Tensor, source: Any) -> Wide:
    np.put_along_axis(target.numbers, index.numpy(), wide(source), dim)
    return target


def _masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    chosen, changed = np.broadcast_to(mask != 0, x.shape), x.copy()
    changed[chosen] = source.reshape(-1)[: chosen.sum()]
    return changed


def _masked_scatter_backward(grad: Any, mask: Any, sizes: Sequence[int]) -> Any:
    slopes = np.zeros(int(np.prod(sizes)), np.longdouble)
    chosen = grad[np.broadcast_to(mask != 0, grad.shape)]
    slopes[: len(chosen)] = chosen
    return slopes.reshape(sizes)


def _topk(x: Wide, k: int, dim: int = -1, *_: Any, **__: Any) -> tuple[Wide, Tensor]:
    places = torch.topk(_near(x), k, dim).indices
    return Wide(np.take_along_axis(x.numbers, places.numpy(), dim)), places


def _of_copy(of: Callable[..., Wide]) -> Callable[..., Wide]:
    """An operation that overwrites a copy of its first argument."""
    return lambda target, *args, **kwargs: of(Wide(wide(target).copy()), *args, **kwargs)


def _slice(x: Wide, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Wide:
    return Wide(x.numbers[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)])


def _as_strided(x: Wide, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Wide:
    whole = x.numbers.reshape(-1)[offset:]
    return Wide(np.lib.stride_tricks.as_strided(whole, size, [each * whole.itemsize for each in stride]))


def _zeros(x: Any, size: Any = None, *_: Any, **__: Any) -> Wide:
    return Wide(np.zeros(x.shape if size is None else tuple(size), np.longdouble))


def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return np.where(np.asarray(mask) != 0, np.longdouble(value), x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _add, "sub": lambda x, y, alpha=1: _add(x, y, -alpha), "rsub": lambda x, y: y - x,
    "mul": lambda x, y: x * y, "div": lambda x, y: x / y, "neg": lambda x: -x, "pow": lambda x, y: x**y,
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh,
    "reciprocal": lambda x: 1 / x, "relu": lambda x: np.maximum(x, 0),
    "threshold_backward": lambda grad, x, bound: grad * (x > bound),
    "tanh_backward": lambda grad, y: grad * (1 - y * y), "sigmoid": _sigmoid,
    "sigmoid_backward": lambda grad, y: grad * y * (1 - y), "silu": lambda x: x * _sigmoid(x),
    "silu_backward": _silu_backward, "gelu": _gelu, "gelu_backward": _gelu_backward, "sum": _sum, "mean": _mean,
    "mm": np.matmul, "bmm": np.matmul, "addmm": lambda x, y, z: x + y @ z, "masked_fill": _masked_fill,
    "masked_scatter": _masked_scatter, "masked_scatter_backward": _masked_scatter_backward,
    "_softmax": _softmax, "_softmax_backward_data": _softmax_backward, "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _log_softmax_backward, "where": np.where,
}  # fmt: skip
"""Operations of numbers, by the name in torch."""
COMPUTED: dict[str, Callable[..., Any]] = {
    **{name: _function(of) for name, of in FUNCTIONS.items()},
    **{f"{name}_": _in_place(FUNCTIONS[name]) for name in ("add", "sub", "mul", "div", "masked_fill")},
    "copy_": _in_place(lambda _, source, *__: source), "zero_": _in_place(lambda x: 0 * x),
    "fill_": _in_place(lambda _, value: value), "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward, "embedding_dense_backward": _embedding_backward,
    "index_add_": _index_add_, "index_add": _of_copy(_index_add_), "index_put_": _index_put_,
    "index_put": _of_copy(_index_put_), "_index_put_impl_": _index_put_, "scatter_add_": _scatter_add_,
    "scatter_add": _of_copy(_scatter_add_), "scatter_": _scatter_, "scatter": _of_copy(_scatter_), "topk": _topk,
    "slice": _slice, "as_strided": _as_strided,
    "zeros_like": _zeros, "new_zeros": _zeros, "empty_like": _zeros, "new_empty": _zeros,
    "new_empty_strided": _zeros,
    "ones_like": lambda x, **_: Wide(np.ones(x.shape, np.longdouble)),
}  # fmt: skip
"""Operations that compute."""


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention [batch, heads, S, width] by products and a softmax. Masks are of truth values, or added."""
    assert dropout_p == 0.0
    if enable_gqa:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -1e300)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ v


def _layer_norm(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    off = x - x.mean(-1, keepdim=True)
    normed = off * torch.rsqrt(off.pow(2).mean(-1, keepdim=True) + eps)
    weighed = normed if weight is None else normed * weight
    return weighed if bias is None else weighed + bias


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, *_: Any
) -> Tensor:
    """A convolution [batch, channels, sizes] of patches that lie side by side, as a product."""
    kernel = tuple(weight.shape[2:])
    assert tuple(stride) == kernel
    assert not any(padding)
    cut = [part for size, width in zip(x.shape[2:], kernel, strict=True) for part in (size // width, width)]
    places = range(2, 2 + len(cut))
    patches = x.reshape(*x.shape[:2], *cut).permute(0, *places[::2], 1, *places[1::2]).flatten(1 + len(kernel))
    product = patches @ weight.flatten(1).t()
    return (product if bias is None else product + bias).movedim(-1, 1)


WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    nn.functional.scaled_dot_product_attention: _attention,
    nn.functional.layer_norm: _layer_norm,
}
"""What replaces functions of torch whose operations are not here."""


def widen(model: nn.Module) -> nn.Module:
    """``model`` itself, whose parameters are now long doubles."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = made.setdefault(id(parameter), nn.Parameter(Wide(wide(parameter))))
    return model


def narrow(tensor: Tensor) -> Tensor:
    """The nearest float64 of a tensor."""
    nearest: Tensor = _near(tensor)
    return nearest
