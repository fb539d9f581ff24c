"""Numbers of the Triton kernels beside those of their twins: on a GPU, or in Triton's interpreter.

    TRITON_INTERPRET=1 python tests/support/kernel_numbers.py            every kernel, in float32 and float16; with
                                                                         --some in float32
    TRITON_INTERPRET=1 python tests/support/kernel_numbers.py --faults   every fault of the table, planted alone; with
                                                                         --first the first of each kernel

The variable decides when Triton is first loaded, and an index out of range ends the process. Tests start this
file in another process. The interpreter cuts bfloat16 where a device rounds, so that it says nothing about it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.kernels.library import looked_up
from schedc_runtime.kernels.registry import ROWS
from schedc_runtime.kernels.rows import KernelRow
from support.kernel_cases import CASES, Args
from support.route_faults import ROUTE_FAULTS

EPSILON = {torch.float32: 1.0, torch.float16: 300.0, torch.bfloat16: 16000.0}
"""By dtype: by how much more than float32 it may be off."""
_INTERPRETED = (torch.float32, torch.float16)
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _tensors(values: Any) -> list[Tensor]:
    """All tensors of arguments or results, in their order."""
    if isinstance(values, Tensor):
        return [values]
    return [each for value in values for each in _tensors(value)] if isinstance(values, list | tuple) else []


def _called(function: Callable[..., Any], args: Args) -> list[Tensor]:
    """Results of a call on copies of its arguments, and these copies behind the call."""
    own = copy.deepcopy(args)
    results = function(*own)
    if results is NotImplemented:
        raise AssertionError(f"the kernel leaves a case to its twin: {[x.dtype for x in _tensors(args)]}")
    return [*_tensors(results), *_tensors(own)]


def _bits(numbers: Tensor) -> Tensor:
    """[...] whole numbers with the bits of ``numbers`` [...]."""
    return numbers.view(_WHOLE[numbers.element_size()]) if numbers.is_floating_point() else numbers


def differences(row: KernelRow, launch: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Where the results of a kernel and of its twin differ."""
    torch.manual_seed(0)
    for number, args in enumerate(CASES[row.name](dtype, device)):
        for ours, theirs in zip(_called(launch, args), _called(looked_up(row.twin), args), strict=True):
            where = f"{row.name}, case {number}, {str(dtype).removeprefix('torch.')}"
            if ours.dtype is not theirs.dtype or ours.shape != theirs.shape:
                yield f"{where}: {ours.dtype} {list(ours.shape)}, and the twin {list(theirs.shape)}"
            elif row.bits:
                if other := int((_bits(ours) != _bits(theirs)).sum()):
                    yield f"{where}: {other} other numbers"
            elif theirs.numel():
                error, norm = float((ours.double() - theirs.double()).norm()), float(theirs.double().norm())
                if not error <= row.bound * EPSILON[dtype] * norm:
                    yield f"{where}: {error} off"


def wrong(device: torch.device, dtypes: Sequence[torch.dtype]) -> list[str]:
    """Where results of kernels and of their twins differ."""
    rows = [row for row in ROWS if row.twin]
    return [text for row in rows for dtype in dtypes for text in differences(row, looked_up(row.launch), device, dtype)]


@dataclass(frozen=True)
class KernelFault:
    """A change of a kernel's text that its numbers must show."""

    kernel: str
    what: str
    before: str
    after: str


FAULTS = (
    KernelFault("swiglu", "no scale", "if scale is not None:", "if False:"),
    KernelFault("swiglu", "mask of a block's end", "at < columns\n    dtype", "at < columns - 1\n    dtype"),
    KernelFault("swiglu", "bias of the expert before", "<= row\n", "< row\n"),
    KernelFault("swiglu", "stride of the other half", "up + row * up_row", "up + row * columns"),
    KernelFault("swiglu_backward", "gradients swapped", "d * chosen, mask", "d * g, mask"),
    KernelFault("swiglu_backward", "scale behind its gradient", "products += d *", "products += 2 * d *"),
    KernelFault("swiglu_backward", "one block of a row", "range(0, columns, BLOCK)", "range(0, BLOCK, BLOCK)"),
    KernelFault("permute", "no padding", "tl.load(blank[part] + entry) == 0", "tl.load(blank[part] + entry) >= 0"),
    KernelFault("permute", "one part alone", "tl.static_range(len(rows))", "tl.static_range(1)"),
    KernelFault("permute", "stride of the other side", "* out_strides[part]", "* row_strides[part]"),
    KernelFault("combine", "from the end", "at[LEVEL] + entry", "at[LEVEL] + begin + end - 1 - entry"),
    KernelFault("combine", "a level twice", "row_stride, index, across", "row_stride, number, across"),
    KernelFault("combine", "an entry of the next bag", "range(begin, end)", "range(begin, end + 1)"),
    KernelFault("choose", "ties to the last", "GROUPS * SIZE - 1 - number).to", "number).to"),
    KernelFault("choose", "a group's best alone", "if SIZE > 1:", "if False:"),
    KernelFault("choose", "zeros apart", "(value + 0.0)", "value"),
    KernelFault("count", "capacity one off", "(count > CAPACITY)", "(count > CAPACITY - 1)"),
    KernelFault("count", "dropped ones kept", "(chosen < 0) |", "(chosen < -9) |"),
    KernelFault("count", "tokens by choices", "counted += tl.max(held", "counted += tl.sum(held"),
    KernelFault("weighted_backward", "no gate", "(d * gate)", "d"),
    KernelFault("weighted_backward", "rows of the gradient", "(x * gate)", "(d * gate)"),
    KernelFault("weighted_backward", "the last block alone", "products += d * x", "products = d * x"),
    KernelFault("rms_rows", "no eps", "/ columns + eps)", "/ columns + 0 * eps)"),
    KernelFault("rms_rows", "the last block alone", "squares += number", "squares = number"),
    KernelFault("rms_rows", "rounded late", "EARLY:\n            normal", "False:\n            normal"),
    KernelFault("rms_rows_backward", "rounded late", " if EARLY else given", " if False else given"),
    KernelFault("rms_rows_weight", "rounded late", "EARLY:\n            normal", "False:\n            normal"),
    KernelFault("rms_rows_backward", "sum of another sign", "-0.5 *", "0.5 *"),
    KernelFault("rms_rows_backward", "no weight", "given = given * tl", "given = given + 0 * tl"),
    KernelFault("rms_rows_backward", "rows side by side", "x + row * x_row + at", "x + row * columns + at"),
    KernelFault("rms_rows_weight", "one tile of rows", "range(0, rows, ROWS)", "range(0, ROWS, ROWS)"),
    KernelFault("rms_rows_weight", "no norm", "number * tl.load(rstd", "number + 0 * tl.load(rstd"),
    KernelFault("latent_heads", "turned the other way", "- (second * sine)", "+ (second * sine)"),
    KernelFault("latent_heads", "positions of rows", "tl.program_id(0) % tokens * HALF", "tl.program_id(0) * HALF"),
    KernelFault("latent_heads", "values of keys", "from_pair + PLAIN + value", "from_pair + value"),
    KernelFault("latent_heads", "key without positions", "shared + HALF", "shared"),
    KernelFault("latent_heads_backward", "turned forward", "sine = -tl", "sine = tl"),
    KernelFault("latent_heads_backward", "the last heads alone", "firsts += tl", "firsts = tl"),
    KernelFault("latent_heads_backward", "another's strides", "head * strides[4]", "head * strides[1]"),
    KernelFault("rotate", "the same both ways", "if BACK:", "if False:"),
    KernelFault("rotate", "heads as tokens", "head, token, batch = row", "token, head, batch = row"),
    KernelFault("rotate", "the left sine", "first * right_sine", "first * left_sine"),
    KernelFault("rotate", "strides of another", "token.to(tl.int64) * strides[11]", "token.to(tl.int64) * strides[2]"),
    KernelFault("add_gradients", "no rest", "inside = (rest < count) &", "inside = (rest < 0) &"),
    KernelFault("add_gradients", "a pair too early", "block >= starts", "block + 1 >= starts"),
    KernelFault("add_gradients", "subtracted", "+ tl.load(summand + at", "- tl.load(summand + at"),
    *(KernelFault(*fault) for fault in ROUTE_FAULTS),
)  # fmt: skip
"""The faults; each is planted alone."""


def _changed(fault: KernelFault, launch: str, folder: Path) -> Callable[..., Any]:
    """The launch of a kernel in a copy of its file that has the fault."""
    module, _, function = launch.partition(":")
    text = Path(str(importlib.util.find_spec(module).origin)).read_text(encoding="utf-8")  # type: ignore[union-attr]
    if text.count(fault.before) < 1:
        raise AssertionError(f"{fault.kernel} has no text {fault.before!r}")
    file = folder / f"fault_{abs(hash((fault.kernel, fault.what)))}.py"
    file.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    loaded_copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded_copy)
    result: Callable[..., Any] = getattr(loaded_copy, function)
    return result


def not_seen(faults: Iterable[KernelFault]) -> list[str]:
    """The planted faults that no case shows. A fault may end its process, so each has one."""
    with tempfile.TemporaryDirectory() as folder:
        return [f"{fault.kernel}: {fault.what}" for fault in faults if not _seen(fault, Path(folder))]


_RAISED = 3


def _seen(fault: KernelFault, folder: Path) -> bool:
    row = next(row for row in ROWS if row.name == fault.kernel)
    launch = _changed(fault, row.launch, folder)
    if child := os.fork():
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended == _RAISED:
            raise AssertionError(f"{fault.kernel}: {fault.what} raises: a fault changes numbers, or ends the process")
        return ended != 0
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        cpu = torch.device("cpu")
        os._exit(any(text for dtype in _INTERPRETED for text in differences(row, launch, cpu, dtype)))
    except Exception:
        os._exit(_RAISED)


def main() -> None:
    if "--faults" in sys.argv:
        first = {fault.kernel: fault for fault in reversed(FAULTS)}
        print(json.dumps(not_seen(first.values() if "--first" in sys.argv else FAULTS)))
        return
    from support import product_cases

    cpu = torch.device("cpu")
    dtypes = _INTERPRETED[:1] if "--some" in sys.argv else _INTERPRETED
    of_products = [text for dtype in dtypes for text in product_cases.wrong(cpu, dtype)]
    print(json.dumps(wrong(cpu, dtypes) + of_products))


if __name__ == "__main__":
    main()
