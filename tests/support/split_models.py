"""Small models whose weights are used in every way that a split backward must understand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.nn.utils import parametrizations

from schedc_runtime.stage.hooks import has_hooks, hook_mark
from schedc_runtime.stage.split import SplitBackward

WIDTH = 6


class Tokens(nn.Module):
    """An embedding with a padding row, a norm, and products with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH, padding_idx=2)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.down(torch.relu(self.up(self.norm(x).transpose(0, -2)))).transpose(0, -2)


class TiedThrice(nn.Module):
    """One table: two embeddings, which use the table directly, and a head, which reads the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, WIDTH))
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.between(functional.embedding(ids, self.table))
        second = torch.tanh(first + functional.embedding(ids.flip(0), self.table))
        return functional.linear(second, self.table)


class ThreeUses(nn.Module):
    """Experts as an einsum. One stack is used three times, once through a slice and once in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.other = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bi,eij->ebj", x, self.stack)
        h = torch.einsum("ebj,ejk->ebk", h, self.other) + torch.baddbmm(h, h, self.stack, alpha=0.5, beta=2)
        buffer = torch.zeros(x.shape[0], WIDTH)
        buffer[:] = x @ self.stack[1]
        return h + buffer


class Grouped(nn.Module):
    """Grouped products over weights that lie by rows and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2, 16, 32))
        self.columns = nn.Parameter(torch.randn(2, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([3, 8], dtype=torch.int32)
        h = functional.grouped_mm(x, self.rows, offs=ends)
        return functional.grouped_mm(h, self.columns.transpose(1, 2), offs=ends)


class WholeBiases(nn.Module):
    """Three products whose outputs are added, so that all get the same gradient: two whole biases, and a column."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(3, columns)) for columns in (WIDTH, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        outputs = [torch.addmm(bias, x, weight) for bias, weight in zip(self.biases, self.weights, strict=True)]
        return outputs[0] + outputs[1] + outputs[2]


class Narrow(nn.Module):
    """A weight with a product of two narrow ones added, and queries that come from parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))
        self.queries = nn.Parameter(torch.randn(4, WIDTH))
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.weight + 0.5 * (self.b @ self.a))
        return torch.softmax(self.project(self.norm(self.queries)) @ x.t(), -1) @ x


class Doubling(torch.autograd.Function):
    """A function of a user, which has no recipe."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.t(), 2 * x.t() @ grad


class Opaque(nn.Module):
    """Weights behind an LSTM, a bilinear layer and a function of a user: all of them stay in I."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.bilinear = nn.LSTM(WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bilinear(x, self.lstm(x)[0])
        return Doubling.apply(x, self.weight)  # type: ignore[no-untyped-call, no-any-return]


class Regularized(nn.Module):
    """A weight that a product uses, and that the loss uses directly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)) + self.layer.weight.square().sum()


def twice() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for parameter in (model[0].weight, model[1].bias, model[2].weight, model[2].bias):
        parameter.requires_grad_(False)
    return model


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, groups=2, bias=False),
        nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 4, 3),
    )  # fmt: skip


def _floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def weight_norms() -> nn.Module:
    return nn.Sequential(*[parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], float]] = {
    "tokens": (Tokens, lambda: torch.randint(0, 9, (4, 5)), 0.88),
    "tied thrice": (TiedThrice, lambda: torch.randint(0, 9, (4, 5)), 1.0),
    "convolutions": (convolutions, _floats(2, 3, 12, 12), 0.96),
    "encoder layer": (encoder_layer, _floats(2, 5, 16), 0.94),
    "weight norm": (weight_norms, _floats(3, WIDTH), 1.0),
    "a weight used twice": (twice, _floats(3, WIDTH), 1.0),
    "three uses": (ThreeUses, _floats(5, WIDTH), 0.0),
    "whole biases": (WholeBiases, _floats(3, WIDTH), 1.0),
    "narrow": (Narrow, _floats(3, WIDTH), 1.0),
    "opaque": (Opaque, _floats(5, WIDTH), 0.0),
    "regularized": (Regularized, _floats(3, WIDTH), 0.5),
    "frozen": (frozen, _floats(3, WIDTH), 0.85),
}
"""By name: the model, an input, and the share of the trainable elements whose gradient W computes."""


class Splitting:
    """A model whose backwards are split. autocast: the type of its forwards, or None.

    mark: whether the split knows when a forward began, so that it can do without hooks of its own. late: which
    gradients that I computes are added in W.
    """

    def __init__(
        self, model: nn.Module, autocast: torch.dtype | None = None, mark: bool = True, late: Any = has_hooks
    ) -> None:
        self.model, self.autocast, self.split, self.mark, self.late = model, autocast, SplitBackward(), mark, late

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input as a leaf, and a scalar loss."""
        leaf = x.detach().requires_grad_(x.is_floating_point())
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            output = self.model(leaf)
        return leaf, output.float().sin().sum()

    def i(self, key: int, x: Tensor) -> Tensor | None:
        """F and I of a microbatch; the gradient of its input."""
        began = hook_mark() if self.mark else None
        leaf, loss = self.forward(x)
        self.split.backward(key, [get_gradient_edge(loss)], [torch.ones_like(loss)], late=self.late, began=began)
        return leaf.grad

    def put_off(self, key: int) -> list[Tensor]:
        """The leaves whose gradients W computes."""
        nodes = [edge.node for group in self.split.pending[key].products for work in group for edge in work.edges]
        leaves: list[Tensor] = []
        for node in nodes:
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            nodes += [child for child, _ in node.next_functions if child is not None]
        return list({id(leaf): leaf for leaf in leaves}.values())


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def differing(one: nn.Module, two: nn.Module) -> list[str]:
    """The names of the parameters whose gradients do not have the same bits."""
    pairs = zip(gradients(one).items(), gradients(two).values(), strict=True)
    return [
        name
        for (name, a), b in pairs
        if (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b))
    ]


def plain(model: nn.Module, inputs: Sequence[Tensor], autocast: torch.dtype | None = None) -> list[Tensor | None]:
    """Autograd's own backward of every input; their gradients."""
    splitting = Splitting(model, autocast)
    grads = []
    for x in inputs:
        leaf, loss = splitting.forward(x)
        loss.backward()  # type: ignore[no-untyped-call]
        grads.append(leaf.grad)
    return grads
