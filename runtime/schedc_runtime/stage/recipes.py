"""Formulas of the weight gradients that can wait: what a product's node must leave behind, and what W makes of it.

Each formula has the operations of torch's own derivative, in its order, hence its bits. `RECIPES` is open: a function
of a user, or of another room of this package, joins by its node's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.errors import StageError

Slots = tuple[int, ...]
Gradients = tuple[Tensor | None, ...]
Saved = Mapping[str | int, Any]
"""Saved tensors by name; None where the node saved none."""


@dataclass(frozen=True)
class Recipe:
    """How the gradients of some inputs of an autograd node are computed later.

    saved: by input of the node (its slot in ``next_functions``), the names of the tensors that its gradient needs. A
        node of torch has them as ``_saved_NAME``. In a user's function a name is a number among ``saved_tensors``.
    product: (slots, gradient of the node's output, tensors by name, facts) -> [slots] gradients, as autograd's.
    facts: (node, slots) -> plain values that ``product`` needs besides. They must not refer to the node.
    with_weight: slots that wait only if another one does: a bias, whose gradient needs nothing more.
    joint: whether one kernel computes all slots in ``saved``. They wait together, or not at all.
    factors: slots of the two factors. Where both come from parameters alone, the product is itself a weight.
    turns: slots whose gradient ``product`` gives transposed if a fifth argument names them.
    leaves: whether the node itself leaves what W needs: the work, which is the node's ``gradient_waits`` in I, gets it
        as ``left``. ``product`` takes it as its saved tensors, and no gradient. All slots wait together, or none.
    """

    saved: Mapping[int, tuple[str | int, ...]]
    product: Callable[..., Gradients]
    facts: Callable[[Any, Slots], Any] = lambda node, slots: None
    with_weight: Slots = ()
    joint: bool = False
    factors: Slots = ()
    turns: Slots = ()
    leaves: bool = False


def waits(ctx: Any) -> bool:
    """Whether the weight gradient of a user's function waits for W: its backward then returns None in its place."""
    return bool(getattr(ctx, "gradient_waits", False))


def refuse_twice(ctx: Any) -> None:
    """Refuse double backward, as torch's `once_differentiable` does; its wrapper costs more than all else here."""
    if torch.is_grad_enabled():
        raise StageError(
            f"{type(ctx).__name__.strip('_')}: the gradient of a gradient is asked for (create_graph=True)",
            "weight gradients that may be deferred are not differentiable; freeze the layer's weight",
        )


def _by_columns(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a matrix [..., rows, columns] lies column by column. Its gradient then does so, too."""
    return strides[-2] == 1 and strides[-1] == sizes[-2]


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _left(grad: Tensor, right: Tensor, columns: bool, turned: bool) -> Tensor:
    """[n, k], or [k, n] if ``turned``: the gradient of the left factor of a product [n, k] x [k, m]."""
    product = right.mm(grad.t()) if columns else grad.mm(right.t())
    return product if columns == turned else product.t()


def _right(grad: Tensor, left: Tensor, columns: bool, turned: bool) -> Tensor:
    """[k, m], or [m, k] if ``turned``: the gradient of the right factor of a product [n, k] x [k, m]."""
    product = grad.t().mm(left) if columns else left.t().mm(grad)
    return product if columns == turned else product.t()


def _mm_facts(node: Any, slots: Slots) -> tuple[bool, bool]:
    if slots == (1,):
        return False, _by_columns(node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides)
    return (
        0 in slots and _by_columns(node._saved_self_sym_sizes, node._saved_self_sym_strides),
        1 in slots and _by_columns(node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides),
    )


def _mm(slots: Slots, grad: Tensor, saved: Saved, columns: tuple[bool, bool], turned: Slots = ()) -> Gradients:
    if slots == (1,):  # as in every linear layer without a bias
        return (_right(grad, saved["self"], columns[1], bool(turned)),)
    left = _left(grad, saved["mat2"], columns[0], 0 in turned)
    return (left,) if slots == (0,) else (left, _right(grad, saved["self"], columns[1], 1 in turned))


def _addmm_facts(node: Any, slots: Slots) -> tuple[bool, bool, float, float]:
    return (
        1 in slots and _by_columns(node._saved_mat1_sym_sizes, node._saved_mat1_sym_strides),
        2 in slots and _by_columns(node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides),
        node._saved_alpha,
        node._saved_beta,
    )


def _addmm(
    slots: Slots, grad: Tensor, saved: Saved, facts: tuple[bool, bool, float, float], turned: Slots = ()
) -> Gradients:
    columns1, columns2, alpha, beta = facts
    compute = (
        lambda: _times(grad, beta),
        lambda: _times(_left(grad, saved["mat2"], columns1, 1 in turned), alpha),
        lambda: _times(_right(grad, saved["mat1"], columns2, 2 in turned), alpha),
    )
    return tuple(compute[slot]() for slot in slots)


def _bmm(slots: Slots, grad: Tensor, saved: Saved, _: None) -> Gradients:
    return tuple(
        saved["self"].transpose(1, 2).bmm(grad) if slot else grad.bmm(saved["mat2"].transpose(1, 2)) for slot in slots
    )


def _baddbmm(slots: Slots, grad: Tensor, saved: Saved, facts: tuple[float, float]) -> Gradients:
    alpha, beta = facts
    compute = (
        lambda: _times(grad, beta),
        lambda: _times(grad.bmm(saved["batch2"].transpose(1, 2)), alpha),
        lambda: _times(saved["batch1"].transpose(1, 2).bmm(grad), alpha),
    )
    return tuple(compute[slot]() for slot in slots)


def _grouped_mm(slots: Slots, grad: Tensor, saved: Saved, columns: tuple[bool, bool]) -> Gradients:
    offsets = saved["offs"]

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch._grouped_mm(a, b, offs=offsets)

    def left() -> Tensor:
        right = saved["mat2"]
        if columns[0]:
            return product(right, grad.transpose(-2, -1)).transpose(-2, -1)
        return product(grad, right.transpose(-2, -1))

    def right() -> Tensor:
        left = saved["self"]
        if columns[1]:
            return product(grad.transpose(-2, -1), left).transpose(-2, -1)
        return product(left.transpose(-2, -1), grad)

    return tuple((left, right)[slot]() for slot in slots)


_UNSIGNED = 1 << 64


def _embedding_facts(node: Any, slots: Slots) -> tuple[int, int, bool, bool]:
    padding = node._saved_padding_idx
    return (
        node._saved_weight_sym_argsize_0,
        padding - _UNSIGNED if padding >= _UNSIGNED // 2 else padding,  # torch shows -1 without its sign
        node._saved_scale_grad_by_freq,
        node._saved_sparse,
    )


def _embedding(slots: Slots, grad: Tensor, saved: Saved, facts: Any) -> Gradients:
    return (torch.ops.aten.embedding_backward(grad, saved["indices"], *facts),)


def _convolution_facts(node: Any, slots: Slots) -> tuple[Any, ...]:
    return (
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )


def _convolution(slots: Slots, grad: Tensor, saved: Saved, facts: tuple[Any, ...]) -> Gradients:
    mask = [slot in slots for slot in range(3)]
    gradients = torch.ops.aten.convolution_backward(grad, saved["input"], saved["weight"], *facts, mask)
    return tuple(gradients[slot] for slot in slots)


COMPILED = "CompiledFunctionBackward"
"""The node of a block that torch.compile has compiled."""

CUT = "cut_for_w"
"""Attribute of the backward of a block that this package compiles: how it is cut, or None if nothing waits."""

RECIPES: dict[str, Recipe | Callable[[Any], Recipe | None]] = {
    "MmBackward0": Recipe({0: ("mat2",), 1: ("self",)}, _mm, _mm_facts, factors=(0, 1), turns=(0, 1)),
    "AddmmBackward0": Recipe(
        {0: (), 1: ("mat2",), 2: ("mat1",)}, _addmm, _addmm_facts, with_weight=(0,), factors=(1, 2), turns=(1, 2)
    ),
    "BmmBackward0": Recipe({0: ("mat2",), 1: ("self",)}, _bmm, factors=(0, 1)),
    "BaddbmmBackward0": Recipe(
        {0: (), 1: ("batch2",), 2: ("batch1",)},
        _baddbmm,
        lambda node, slots: (node._saved_alpha, node._saved_beta),
        with_weight=(0,),
        factors=(1, 2),
    ),
    "GroupedMmBackward0": Recipe({0: ("mat2", "offs"), 1: ("self", "offs")}, _grouped_mm, _mm_facts),
    "EmbeddingBackward0": Recipe({0: ("indices",)}, _embedding, _embedding_facts),
    "ConvolutionBackward0": Recipe(
        {0: ("input", "weight"), 1: ("input", "weight"), 2: ("input", "weight")},
        _convolution,
        _convolution_facts,
        with_weight=(2,),
        joint=True,
    ),
}
"""By the name of an autograd node (``tensor.grad_fn.name()``). A function gives the recipe of a node, or None."""


def recipe_of(node: Any, name: str) -> Recipe | None:
    """The recipe of a node with this name; None if its gradients cannot wait."""
    recipe = RECIPES.get(name)
    return recipe if recipe is None or isinstance(recipe, Recipe) else recipe(node)


def compiled_backward(node: Any) -> Any:
    """The backward of a compiled block's node; None before the first backward, unless this package has compiled it."""
    return getattr(getattr(type(node), "_forward_cls", None), "compiled_bw", None)
