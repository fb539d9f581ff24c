"""Rules of a device on its memory and kernels: fresh memory, grouped products, types of sums, indices, whole numbers.

Each gives the result that a device may give, or raises `DeviceFault` for what a device refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedc_runtime.device.choice import gpu
from schedc_runtime.device.late import poison
from schedc_runtime.device.rule_calls import DeviceFault, Onward, RuledCall

_FACTORS = {
    "mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "addmm_": ("mat1", "mat2"), "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"), "convolution": ("input", "weight"), "convolution_backward": ("input", "weight"),
}  # fmt: skip
"""By product: its operands."""
_ALIGNED = 16
"""Bytes of which the address and the strides of a grouped product's operand are multiples."""


def fresh(call: RuledCall, onward: Onward) -> Any:
    """Memory that was not written holds NaN, or the largest whole number."""
    result = onward(call)
    poison(result)
    return result


def left_as_they_were(call: RuledCall, onward: Onward) -> Any:
    """A grouped product does not write the rows behind the last end, and memory keeps its old values there."""
    result = onward(call)
    poison(result[int(call.get("offs")[-1]) :])
    return result


def groups_rows(call: RuledCall) -> bool:
    """Whether a grouped product has rows of groups, and not columns."""
    return call.get("offs") is not None and call.get("self").dim() == 2 and call.get("mat2").dim() == 3


def operands(call: RuledCall, onward: Onward) -> Any:
    """A grouped product takes int32 ends, and operands whose address and strides are multiples of 16 bytes."""
    ends = call.get("offs")
    if ends is not None and (ends.dtype is not torch.int32 or not ends.is_contiguous()):
        raise DeviceFault(call.name, f"ends are {ends.dtype}", "give contiguous int32 ends")
    for name in ("self", "mat2"):
        operand, item = call.get(name), call.get(name).element_size()
        odd = [stride for stride in operand.stride()[-2:] if stride != 1 and stride * item % _ALIGNED]
        if odd and operand.numel():
            raise DeviceFault(
                call.name, f"a stride of {odd[0] * item} bytes", "copy the operand, or pad its columns to 16 bytes"
            )
        if operand.data_ptr() % _ALIGNED:
            raise DeviceFault(
                call.name, f"`{name}` begins {operand.data_ptr() % _ALIGNED} bytes off", "copy the operand"
            )
    return onward(call)


def sums_in_another_type(call: RuledCall) -> bool:
    """Whether a product names the type of its result."""
    return call.get("out_dtype") is not None


def decomposed(call: RuledCall, onward: Onward) -> Any:
    """A product in the type of its sum has a kernel on a device alone. A CPU casts its operands first."""
    wide = call.get("out_dtype")
    given = {call.get(name).dtype for name in _FACTORS[call.name]}
    if len(given) > 1 or given & {torch.float32, torch.float64}:
        shown = ", ".join(sorted(map(str, given)))
        raise DeviceFault(call.name, f"a sum in {wide} of operands in {shown}", "give both operands in one 16-bit type")
    operator, out = getattr(torch.ops.aten, call.name).default, call.get("out")
    names = [x.name for x in operator._schema.arguments]
    values = {name: call.get(name) for name in names}
    values = {name: each.to(wide) if isinstance(each, Tensor) else each for name, each in values.items()}
    result = operator(**values)
    return result if out is None else out.copy_(result)


def may_be_narrow(call: RuledCall) -> bool:
    """Whether torch's settings let a device round a product's operands or its sums."""
    convolved = call.name.startswith("convolution")
    first = call.get(_FACTORS[call.name][0])
    tf32, reduced = gpu.narrow_sums(first.dtype, convolved)
    return tf32 or (reduced and not convolved and first.shape[-1] > 1 and not sums_in_another_type(call))


def narrow(call: RuledCall, onward: Onward) -> Any:
    """Where torch's settings allow it, float32 operands lose 13 bits (TF32), and sums of 16 bits are rounded twice."""
    left, right = _FACTORS[call.name]
    first, second = call.get(left), call.get(right)
    if first.dtype is torch.float32:
        return onward(call.having(**{left: _tf32(first), right: _tf32(second)}))
    half = first.shape[-1] // 2
    halves = ((first[..., part], second[..., part, :]) for part in (slice(half), slice(half, None)))
    total = sum(a @ b for a, b in halves)
    if "add" in call.name:
        total = total * call.get("alpha") + call.get("self") * call.get("beta")
    out = call.get("self") if call.name.endswith("_") else call.get("out")
    return total if out is None else out.copy_(total)


def _tf32(operand: Tensor) -> Tensor:
    """[...] float32 with 10 bits behind the point, rounded to nearest."""
    bits = operand.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


_ROWS = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only"})
"""Operations whose indices are rows of a ``weight``."""


def ranges(call: RuledCall, onward: Onward) -> Any:
    """An index that is out of range ends the context of a device."""
    indices = call.get("indices")
    if call.name in _ROWS:
        _within(call, indices, len(call.get("weight")))
    elif call.name == "embedding_dense_backward":
        _within(call, indices, call.get("num_weights"))
    elif call.name == "nll_loss_forward":
        target = call.get("target")
        _within(call, target[target != call.get("ignore_index")], call.get("self").shape[-1])
    elif call.name == "take":
        _within(call, call.get("index"), call.get("self").numel(), signed=True)
    elif indices is not None:
        for dim, index in enumerate(indices):
            if index is not None and index.dtype not in (torch.bool, torch.uint8):
                _within(call, index, call.args[0].shape[dim], signed=True)
    elif call.get("self").dim():
        _within(call, call.get("index"), call.get("self").shape[call.get("dim")])
    return onward(call)


def _within(call: RuledCall, index: Tensor, size: int, signed: bool = False) -> None:
    if index.numel():
        low, high = (int(value) for value in index.aminmax())
        if high >= size or low < (-size if signed else 0):
            wrong = high if high >= size else low
            raise DeviceFault(
                call.name,
                f"index {wrong:,} of {size:,} ends the context of a device",
                "cut or clamp the index, or leave out what it belongs to",
            )


_WIDE = {torch.int32: torch.int64, torch.int16: torch.int64}


def is_whole(call: RuledCall) -> bool:
    """Whether the result may have whole numbers of 16 or 32 bits."""
    if (dtype := call.get("dtype")) is not None:
        return dtype in _WIDE
    given = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    if call.name.endswith("_") or call.get("out") is not None:
        return (call.get("out") if call.get("out") is not None else given[0]).dtype in _WIDE
    kept = call.name not in ("sum", "prod", "cumsum", "cumprod", "_to_copy")  # these give int64 by default
    types = {x.dtype for x in given if x.dim()} or {x.dtype for x in given}
    return kept and bool(types) and types <= {*_WIDE, torch.int8, torch.uint8, torch.bool} and bool(types & {*_WIDE})


def whole(call: RuledCall, onward: Onward) -> Any:
    """Whole numbers of 16 and 32 bits wrap round silently: the same is computed in 64 bits, and compared."""
    out = call.get("out")
    kept = out.clone() if call.name.endswith("_") and out is not None else None
    before = call.args[0].clone() if call.name.endswith("_") and isinstance(call.args[0], Tensor) else None
    result = onward(call)
    expected = _in_64_bits(call, before if kept is None else kept)
    if not torch.equal(result.long(), expected.expand_as(result)):
        raise DeviceFault(
            call.name, f"the result does not fit into {result.dtype}", "compute it in int64: sizes may be large"
        )
    return result


def _in_64_bits(call: RuledCall, before: Tensor | None) -> Tensor:
    """What the call gives in 64 bits. before: the old values of the argument that the call writes."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.is_floating_point() else value.long()
        return torch.int64 if isinstance(value, torch.dtype) and value in _WIDE else value

    functional = getattr(torch.ops.aten, call.name.removesuffix("_"))
    args = [wide(value) for value in (call.args if before is None else (before, *call.args[1:]))]
    named = {name: wide(value) for name, value in call.kwargs.items() if name != "out"}
    result: Tensor = functional(*args, **named)
    return result.long()
