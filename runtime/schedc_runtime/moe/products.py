"""The providers that multiply rows by the matrices of their experts, and the choice of one for a layer.

Every provider computes two products of stacked matrices:

    rows [R, in] x weights [E, in, out]     to [R, out]        the rows of expert e times ``weights[e]``
    rows [R, in] x gradients [R, out]       to [E, in, out]    for each expert its rows, transposed, times its gradients

    loop             a product per expert; every dtype, device and size
    bmm              one batched product; rows that are padded to as many for every expert
    grouped          one launch for all experts (`torch.nn.functional.grouped_mm`), whose row numbers stay on the device
    padded           one batched product of rows that are padded here, to the most rows of an expert
    tiles            a product per 32 rows of an expert: a row has the same bits whatever rows lie beside it
    triton           one launch for all experts by kernels of our own, where Triton is installed; see `triton_products`
    scaled_grouped   grouped products in fp8 with a scale per row, for rows times weights; see `fp8_products`
    quantized        its numbers everywhere: both sides are rounded to fp8 and multiplied in their own dtype

The last two round, and `tiles` is for comparisons of bits: a plan gets them by name alone. `padded` and `triton`
where a plan names them, or where calibration found them fastest (`schedc_runtime.moe.kernels`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from schedc.ir.plan import Products
from schedc_runtime.device.choice import device_for, gpu
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.fp8 import WEIGHTS, as_fp8, fp8_products
from schedc_runtime.providers import Bits, ProviderTable


class RowGroups(NamedTuple):
    """Which rows belong to which expert, where rows lie in the order of the experts.

    counts: [E] rows of each expert, as numbers of the host; None where the host does not know them.
    ends: [E] int32 on the rows' device, index of the row behind each expert's last; None where ``counts`` says it.
    Without both, rows are padded: R / E for each. Rows behind the last end belong to nobody. They are not read, and the
    rows of a product behind it are not written. borrowed: where only the device knows the rows, index of the first row
    of borrowed experts, from which their ends count; None without such.
    """

    counts: tuple[int, ...] | None = None
    ends: Tensor | None = None
    borrowed: int | None = None

    @property
    def padded(self) -> bool:
        return self.counts is None and self.ends is None

    def part(self, first: int, count: int) -> RowGroups:
        """The groups of ``count`` experts from ``first`` on, whose rows are narrowed likewise: own or borrowed ones."""
        if self.counts is None:
            assert self.ends is not None
            return RowGroups(None, self.ends[first : first + count])
        ends = None if self.ends is None else self.ends[first : first + count]
        if ends is not None and first:
            ends = ends - sum(self.counts[:first])
        return RowGroups(self.counts[first : first + count], ends)

    def on_host(self, rows: int, experts: int) -> tuple[int, ...]:
        """[E] rows of each expert. Waits for the device where only that knows them."""
        if self.counts is not None:
            return self.counts
        if self.ends is None:
            return (rows // experts,) * experts
        ends = self.ends.tolist()
        return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))

    def on_device(self, like: Tensor, experts: int) -> Tensor:
        """[E] int32 ends on the device of ``like`` [R, ...]. Asks nothing; uploads what only the host knows."""
        if self.ends is not None:
            return self.ends
        if self.counts is not None:
            return torch.tensor(self.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(like.device)
        each = len(like) // experts
        return torch.arange(1, experts + 1, dtype=torch.int32, device=like.device) * each


RowCounts = Sequence[int] | Tensor | RowGroups | None
"""[E] rows of each expert, on the host or the device; None: padded, R / E each."""


def expert_groups(counts: RowCounts) -> RowGroups:
    """The groups of rows with these counts [E]."""
    if isinstance(counts, RowGroups):
        return counts
    if isinstance(counts, Tensor):
        return RowGroups(ends=counts.cumsum(0, dtype=torch.int32))
    return RowGroups() if counts is None else RowGroups(tuple(counts))


class Case(NamedTuple):
    """What a choice depends on.

    columns: columns of the rows, of the first product and of the activation. padded: rows have static shapes, as many
    for each expert. counted: the host knows the rows of each expert.
    """

    device: torch.device
    dtype: torch.dtype
    columns: tuple[int, ...]
    padded: bool
    counted: bool = True


Multiply = Callable[[Tensor, Tensor, RowGroups, Tensor], Tensor]
"""(left, right, groups, weight) -> product.

left: [R, in] rows. right: [E, in, out] weights, or [R, out] gradients. weight: [E, in, out]. A product of
its shape has its strides, so that the optimizer needs no copy.
"""


@dataclass(frozen=True)
class Provider:
    """A way to multiply, as `AnyProvider`.

    bits: whether it adds each product in the order of the loop, so that results have the loop's bits. alike_on: types
    of devices on which it does where ``bits`` is "own". rows_keep_on: types of devices on which a row has the same bits
    whatever rows lie beside it. rounds: the type that operands are rounded to; empty without rounding. fallback: who
    takes its place first where a plan says ``or fallback``.
    """

    name: str
    why_not: Callable[[Case], str]
    multiply: Multiply
    bits: Bits = "loop"
    alike_on: tuple[str, ...] = ()
    rows_keep_on: tuple[str, ...] = ()
    rounds: str = ""
    fallback: str = ""
    kind: str = "products"

    def adds_alike(self, device: torch.device) -> bool:
        """Whether results on a device have bits of their own rows alone: the loop's, or those of tiles."""
        return self.bits == "loop" or device.type in (*self.alike_on, *self.rows_keep_on)

    def available(self, case: Case) -> bool:
        return not self.why_not(case)


def _loop(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    counts = groups.on_host(len(left), len(weight))
    filled = sum(counts)
    lefts = left[:filled].split_with_sizes(counts)
    if right.dim() == 3:
        result = left.new_empty(len(left), right.shape[2])
        for part, matrix, target in zip(lefts, right.unbind(), result[:filled].split_with_sizes(counts), strict=True):
            if len(part):
                torch.mm(part, matrix, out=target)
        return result
    result = torch.empty_like(weight, dtype=left.dtype)
    for part, gradient, target in zip(lefts, right[:filled].split_with_sizes(counts), result.unbind(), strict=True):
        if len(part):
            torch.mm(part.t(), gradient, out=target)
        else:
            target.zero_()
    return result


def _bmm(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    experts = len(weight)
    blocks = left.reshape(experts, -1, left.shape[1])
    if right.dim() == 3:
        return blocks.bmm(right).view(-1, right.shape[2])
    return blocks.transpose(1, 2).bmm(right.reshape(experts, -1, right.shape[1]))


def _not_bmm(case: Case) -> str:
    return "" if case.padded else "experts have different numbers of rows: only a `capacity` pads them"


def _padded(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    """Blocks have the rows of an expert and zeros behind them. The device works out the places of rows."""
    if groups.counts is None:
        return _bmm(left, right, groups, weight)
    experts, most, filled = len(weight), max(groups.counts, default=0), sum(groups.counts)
    ends = groups.on_device(left, experts).long()
    rows = torch.arange(filled, device=left.device)
    expert = torch.bucketize(rows, ends, right=True)
    places = rows + (torch.arange(experts, device=left.device) * most - functional.pad(ends[:-1], (1, 0)))[expert]

    def blocks(matrix: Tensor) -> Tensor:
        into = matrix.new_zeros(experts * most, matrix.shape[1])
        return into.index_copy_(0, places, matrix[:filled]).view(experts, most, matrix.shape[1])

    if right.dim() == 3:
        products = blocks(left).bmm(right).view(experts * most, right.shape[2])
        result = left.new_empty(len(left), right.shape[2])
        torch.index_select(products, 0, places, out=result[:filled])
        return result
    if weight.stride(1) == 1 and weight.stride(2) == weight.shape[1]:
        return blocks(right).transpose(1, 2).bmm(blocks(left)).transpose(1, 2)
    return blocks(left).transpose(1, 2).bmm(blocks(right))


TILE = 32
"""Rows of a tile."""


def _tiles(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    """Every product of rows has `TILE` of them, the last of an expert with zeros behind. Gradients are the loop's."""
    if right.dim() == 2:
        return _loop(left, right, groups, weight)
    counts = groups.on_host(len(left), len(weight))
    result = left.new_empty(len(left), right.shape[2])
    padded, products = left.new_zeros(TILE, left.shape[1]), left.new_empty(TILE, right.shape[2])
    lefts, targets = (matrix[: sum(counts)].split_with_sizes(counts) for matrix in (left, result))
    for rows, matrix, target in zip(lefts, right.unbind(), targets, strict=True):
        for tile, into in zip(torch.split(rows, TILE), torch.split(target, TILE), strict=True) if len(rows) else ():
            padded[: len(tile)] = tile  # also a whole tile: the strides of ``left`` change bits
            padded[len(tile) :].zero_()
            torch.mm(padded, matrix, out=products)
            into.copy_(products[: len(tile)])
    return result


def _not_tiles(case: Case) -> str:
    return "" if case.counted or case.padded else "only the device knows the rows of each expert"


def _not_padded(case: Case) -> str:
    if case.counted or case.padded:
        return ""
    return "only the device knows the rows of each expert, and the most of them is the size of a block"


_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _not_triton(case: Case) -> str:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if case.dtype not in _TRITON_DTYPES:
        return f"{str(case.dtype).removeprefix('torch.')}: these kernels take bfloat16, float16 and float32"
    if case.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return device_for(case.device).supports("triton")


def _triton(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    from schedc_runtime.triton_kernels.products import triton_products  # not installed everywhere

    return triton_products(left, right, groups.on_device(left, len(weight)), weight)


_STRIDE = 16
"""Bytes of which the strides of a grouped product's operands are multiples."""


def _grouped(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    if left.is_meta:
        return left.new_empty(len(left), right.shape[2]) if right.dim() == 3 else torch.empty_like(weight)
    ends = groups.on_device(left, len(weight))
    if right.dim() == 3:
        product: Tensor = functional.grouped_mm(_strided(left), right, offs=ends)
    elif weight.stride(1) == 1 and weight.stride(2) == weight.shape[1]:
        product = functional.grouped_mm(_strided(right).t(), _strided(left), offs=ends).transpose(1, 2)
    else:
        product = functional.grouped_mm(_strided(left).t(), _strided(right), offs=ends)
    return product


def _strided(matrix: Tensor) -> Tensor:
    """[rows, columns] the same, in an order that a grouped product takes: gradients may be expanded or views."""
    item, (rows, columns) = matrix.element_size(), matrix.stride()
    whole = columns == 1 and rows >= matrix.shape[1] and rows * item % _STRIDE == 0
    aligned = not device_for(matrix.device).holds(matrix) or matrix.data_ptr() % _STRIDE == 0
    return matrix if whole and aligned else matrix.clone(memory_format=torch.contiguous_format)


def _not_grouped(case: Case) -> str:
    served = _GROUPED_DTYPES.get(case.device.type, ())
    if case.dtype not in served:
        shown = ", ".join(str(dtype).removeprefix("torch.") for dtype in served) or "none"
        return f"{str(case.dtype).removeprefix('torch.')} on {case.device.type}: grouped products take {shown} there"
    if reason := device_for(case.device).supports("grouped products"):
        return f"{reason}: torch would copy the ends to the host, and multiply expert after expert"
    item = torch.empty((), dtype=case.dtype).element_size()
    if odd := [count for count in case.columns if count * item % _STRIDE]:
        return f"{odd[0]} columns of {item} bytes: strides have to be multiples of {_STRIDE} bytes"
    return ""


_GROUPED_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "meta": (torch.float32, torch.bfloat16, torch.float16),
    gpu.TYPE: (torch.bfloat16,),
}
"""Dtypes by type of device. Elsewhere torch runs its own loop, for which the host waits for the ends."""


_SCALED_COLUMNS = 16
"""Columns of which operands in fp8 have multiples."""


def _not_scaled(case: Case) -> str:
    here = f"{str(case.dtype).removeprefix('torch.')} on {case.device.type}"
    if case.dtype is not torch.bfloat16 or case.device.type == "cpu":
        return f"{here}: fp8 products take bfloat16 rows on a GPU of compute capability 9 or 10"
    if reason := device_for(case.device).supports("fp8 products"):
        return reason
    if odd := [count for count in case.columns if count % _SCALED_COLUMNS]:
        return f"{odd[0]} columns: fp8 products take multiples of {_SCALED_COLUMNS}"
    return ""


def _scaled(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    if right.dim() == 2:
        return _grouped(left, right, groups, weight)
    return fp8_products(left, right, groups.on_device(left, len(weight)))


def _quantized(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    case = Case(left.device, left.dtype, (*left.shape[1:], *right.shape[-1:]), groups.padded)
    multiply = _loop if _not_grouped(case) else _grouped
    if right.dim() == 2:
        return multiply(left, right, groups, weight)
    return multiply(as_fp8(left), WEIGHTS.as_fp8(right.transpose(1, 2)).transpose(1, 2), groups, weight)


PROVIDERS = ProviderTable(
    "products",
    (
        Provider("bmm", _not_bmm, _bmm),
        Provider("grouped", _not_grouped, _grouped, "own", ("cpu",)),
        Provider("loop", lambda case: "", _loop),
        Provider("padded", _not_padded, _padded, "own"),
        Provider("tiles", _not_tiles, _tiles, "own", rows_keep_on=("cpu",)),
        Provider("triton", _not_triton, _triton, "own"),
        Provider("scaled_grouped", _not_scaled, _scaled, "own", rounds="fp8", fallback="quantized"),
        Provider("quantized", lambda case: "", _quantized, "own", rounds="fp8"),
    ),
)
"""By name, best first."""
_BY_AUTO = ("bmm", "grouped", "loop")
"""Those that `auto` chooses from; the last serves everything."""


@cache
def provider_for(products: Products, case: Case) -> Provider:
    """The provider of a layer for a case. Raises `RuntimeFault` where a named one cannot serve it."""
    if products.name != "auto":
        named = PROVIDERS.named(products.name, "auto")
        if not (reason := named.why_not(case)):
            return named
        if not products.or_fallback:
            short = f", or `precision {named.rounds} or fallback` behind the experts" if named.fallback else ""
            raise RuntimeFault(f"products {named.name}: {reason}", f"write `products {named.name} or fallback`{short}")
        if named.fallback and PROVIDERS[named.fallback].available(case):
            return PROVIDERS[named.fallback]
    return next(PROVIDERS[name] for name in _BY_AUTO if PROVIDERS[name].available(case))


def passed_over(products: Products, case: Case) -> dict[str, str]:
    """Why better providers than the one of `provider_for` do not serve a case, by name."""
    chosen = provider_for(products, case).name
    better = {} if products.name in ("auto", chosen) else {products.name: PROVIDERS.named(products.name)}
    if products.name != chosen and not PROVIDERS[chosen].rounds:
        better |= {name: PROVIDERS[name] for name in _BY_AUTO[: _BY_AUTO.index(chosen)]}
    ordered = sorted(better, key=[*PROVIDERS, products.name].index)
    return {name: reason for name in ordered if (reason := better[name].why_not(case))}


def compared_bitwise(products: Products, device: torch.device) -> Products:
    """The choice for a run whose results are compared bit by bit: of providers that add in the order of the loop.

    Raises `RuntimeFault` for a named provider that adds in another order on ``device``.
    """
    alike = [name for name, provider in PROVIDERS.items() if provider.adds_alike(device)]
    if products.name == "auto":
        return products if set(_BY_AUTO) <= set(alike) else Products("loop")
    named = PROVIDERS.named(products.name)
    if not named.adds_alike(device):
        rounds = named.rounds
        why = f"it rounds to {rounds}" if rounds else f"it adds in an order of its own on {device.type}"
        raise RuntimeFault(
            f"products {products.name}: {why}, and bits are to be compared",
            f"write `products {' or `products '.join(f'{name}`' for name in alike)}, or leave `--check bitwise` out",
        )
    return products


@register_flop_formula(torch.ops.aten._grouped_mm)
def _flops(left: Sequence[int], right: Sequence[int], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Twice the products of all rows: [R, in] x [E, in, out], or [in, R] x [R, out]."""
    return 2 * left[0] * left[1] * right[-1]
