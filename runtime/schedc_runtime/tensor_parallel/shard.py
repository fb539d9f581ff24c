"""Splits the products of cores: each rank keeps its part of a weight, as a plain tensor under the weight's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.tensor_parallel.exchanges import own_part
from schedc_runtime.tensor_parallel.rows import copy_to_try
from schedc_runtime.tensor_parallel.styles import Core, Split, StyledModule

DIM = {Split.ROWS: 0, Split.COLUMNS: 1}
"""The dimension of a weight [out, in] that is split."""


class UnbiasedLinear(nn.Linear):
    """A product in columns, whose bias is added behind the sum over ranks and not here."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], without the bias."""
        return functional.linear(input, self.weight)


def shard_model(model: nn.Module, cores: Iterable[Core], size: int, rank: int) -> None:
    """Keep this rank's parts of the products of all cores. Raises `RuntimeFault` where they do not divide.

    A parameter that is split gets ``tensor_parallel = (dim, size, rank)``.
    """
    cores, seen = tuple(cores), set[int]()
    for core in cores:
        width = getattr(model.get_submodule(core.path), "head_dim", None)
        for each in (*core.into, core.out):
            _check(each, size, seen)
            if not core.opened and each.split is Split.ROWS and isinstance(width, int):
                _check_heads(each, size, width)
    tried = set[str]()
    for core in cores:
        if not core.opened and (kind := repr(model.get_submodule(core.path))) not in tried:
            tried.add(kind)
            _check_parts(model, core, size)
    with torch.no_grad():
        for core in cores:
            for each in (*core.into, core.out):
                for parameter, dim in _split(each):
                    parameter.data = own_part(parameter.data, dim, size, rank).clone()
                    parameter.tensor_parallel = (dim, size, rank)  # type: ignore[attr-defined]
            if core.out.module.bias is not None:
                core.out.module.__class__ = UnbiasedLinear


def _split(styled: StyledModule) -> Iterator[tuple[nn.Parameter, int]]:
    """The parameters of a product that are split, with the dimension."""
    assert styled.split is not None
    weight, bias = styled.module.weight, styled.module.bias
    assert isinstance(weight, nn.Parameter)
    yield weight, DIM[styled.split]
    if styled.split is Split.ROWS and isinstance(bias, nn.Parameter):
        yield bias, 0


def _check(styled: StyledModule, size: int, seen: set[int]) -> None:
    """Refuse a product that does not divide over ``size`` ranks, or that is split already. seen: ids of weights."""
    assert styled.split is not None
    weight: Any = styled.module.weight
    if id(weight) in seen or hasattr(weight, "tensor_parallel") or hasattr(weight, "placements"):
        raise RuntimeFault(
            f"the weight of `{styled.path}` is split already: two names share it, another pipeline has it, or it is a"
            " DTensor",
            "give the pipeline a model with whole, plain weights, each under one name",
        )
    seen.add(id(weight))
    count, what = weight.shape[DIM[styled.split]], "rows" if styled.split is Split.ROWS else "columns"
    if count % size:
        raise RuntimeFault(
            f"`{styled.path}` ({styled.style}) has {count} {what}, which {size} tensor ranks cannot share",
            "take a number of tensor ranks that divides heads, KV heads and the width of MLPs",
        )


def _check_heads(styled: StyledModule, size: int, width: int) -> None:
    """Refuse a product of heads that ``size`` ranks cannot share. width: of a head, as the attention states it."""
    heads, rest = divmod(cast(Tensor, styled.module.weight).shape[0], width)
    if not rest and heads % size:
        raise RuntimeFault(
            f"`{styled.path}` ({styled.style}) has {heads} heads of {width}, which {size} tensor ranks cannot share",
            f"take a number of tensor ranks that divides {heads}",
        )


def _check_parts(model: nn.Module, core: Core, size: int) -> None:
    """Refuse a core whose parts do not add up to it, on random rows and weights.

    One that takes more than rows is not tried.
    """
    weight: Any = core.into[0].module.weight
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        whole = copy_to_try(model.get_submodule(core.path)).eval()
        for parameter in whole.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        rows = torch.randn(1, 4, weight.shape[1], dtype=weight.dtype, device=next(whole.parameters()).device)
        try:
            expected = _result(whole(rows))
        except Exception:
            return
        total = torch.zeros_like(expected)
        for rank in range(size):
            part = deepcopy(whole)
            for each in (*core.into, core.out):
                own: Any = part.get_submodule(each.path[len(core.path) + 1 :])
                for parameter, dim in _split(each._replace(module=own)):
                    parameter.data = own_part(parameter.data, dim, size, rank).clone()
                if each is core.out and own.bias is not None and rank:
                    own.bias.zero_()
            try:
                total += _result(part(rows))
            except Exception:
                total += float("inf")
    if not (total - expected).abs().max() <= 0.02 * expected.abs().max():
        raise RuntimeFault(
            f"the parts of the core `{core.path}` on {size} tensor ranks do not add up to it",
            "split products that are fused, and count heads by their width: view(..., -1, head_dim)",
        )


def _result(given: Any) -> Tensor:
    return given if isinstance(given, Tensor) else given[0]
