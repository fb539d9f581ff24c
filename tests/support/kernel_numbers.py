"""Numbers of the Triton kernels beside those of their twins: on a GPU, or in Triton's interpreter.

    TRITON_INTERPRET=1 python tests/support/kernel_numbers.py            every kernel, in float32 and float16
    TRITON_INTERPRET=1 python tests/support/kernel_numbers.py --faults   every fault of the table, planted alone

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.kernels.library import looked_up
from schedc_runtime.kernels.registry import ROWS, KernelRow

EPSILON = {torch.float32: 1.0, torch.float16: 2000.0, torch.bfloat16: 16000.0}
"""By dtype: by how much more than float32 it may be off."""

Args = tuple[Any, ...]
NAN = float("nan")


def _swiglu_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """gate, up, bias, ends, scale: halves of one tensor, and tensors of their own with more than a block of columns."""
    both = torch.randn(5, 72, dtype=torch.float32).to(device, dtype)
    yield *both.chunk(2, -1), None, None, None
    gate, up = (torch.randn(2, 3, 1040).to(device, dtype) for _ in range(2))
    yield gate, up, torch.randn(1, 2080).to(device, dtype), None, torch.randn(2, 3).to(device)
    ends = torch.tensor((2, 2, 6), dtype=torch.int32, device=device)
    many = torch.randn(6, 80).to(device, dtype)
    yield *many.chunk(2, -1), torch.randn(3, 80).to(device, dtype), ends, torch.randn(6).to(device)
    yield *torch.randn(0, 16).to(device, dtype).chunk(2, -1), None, None, None


def _swiglu(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    yield from _swiglu_inputs(dtype, device)


def _swiglu_backward(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for gate, up, bias, ends, scale in _swiglu_inputs(dtype, device):
        halves = torch.full((*gate.shape[:-1], 2 * gate.shape[-1]), NAN).to(device, dtype).chunk(2, -1)
        grad = torch.randn(gate.shape).to(device, dtype)
        scale_grad = None if scale is None else torch.full_like(scale, NAN)
        yield grad, gate, up, bias, ends, scale, *halves, scale_grad
    yield grad.new_ones(1, 1).expand(3, 4), *torch.randn(3, 8).to(device, dtype).chunk(2, -1), None, None, None, *(
        torch.full((3, 4), NAN).to(device, dtype) for _ in range(2)
    ), None  # fmt: skip


def _add_gradients(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    shapes = [(5,), (3, 1024), (7, 11), (0, 4), (2048,), (), (2, 40, 24), (33, 64)]
    for count in (1, len(shapes), 70):
        totals = [torch.randn(shapes[number % len(shapes)]).to(device, dtype) for number in range(count)]
        yield totals, [torch.randn_like(total) for total in totals]
    turned = torch.randn(6, 40, 24).to(device, dtype).mT
    yield [turned, turned.clone()], [torch.randn_like(turned), torch.randn_like(turned).contiguous()]


CASES: dict[str, Callable[[torch.dtype, torch.device], Iterator[Args]]] = {
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "add_gradients": _add_gradients,
}
"""By kernel: arguments of its twin."""


def _tensors(values: Any) -> list[Tensor]:
    """All tensors of arguments or results, in their order."""
    if isinstance(values, Tensor):
        return [values]
    return [each for value in values for each in _tensors(value)] if isinstance(values, list | tuple) else []


def _called(function: Callable[..., Any], args: Args) -> list[Tensor]:
    """Results of a call on copies of its arguments, and these copies behind the call."""
    own = copy.deepcopy(args)
    return [*_tensors(function(*own)), *_tensors(own)]


def differences(row: KernelRow, launch: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> list[str]:
    """Where the results of a kernel and of its twin differ."""
    findings = []
    torch.manual_seed(0)
    for number, args in enumerate(CASES[row.name](dtype, device)):
        for ours, theirs in zip(_called(launch, args), _called(looked_up(row.twin), args), strict=True):
            where = f"{row.name}, case {number}, {str(dtype).removeprefix('torch.')}"
            if ours.dtype is not theirs.dtype or ours.shape != theirs.shape:
                findings.append(f"{where}: {ours.dtype} {list(ours.shape)}, and the twin {list(theirs.shape)}")
            elif row.bits and dtype is torch.float32:
                if not torch.equal(ours, theirs):
                    findings.append(f"{where}: {int((ours != theirs).sum())} other numbers")
            elif theirs.numel():
                bound = max(row.bound, 1e-7) * EPSILON[dtype]
                if not (error := float((ours.double() - theirs.double()).norm())) <= bound * float(
                    theirs.double().norm()
                ):
                    findings.append(f"{where}: {error} off")
    return findings


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
    KernelFault("add_gradients", "no rest", "inside = (rest < count) &", "inside = (rest < 0) &"),
    KernelFault("add_gradients", "a pair too early", "block >= starts[pair]:", "block + 1 >= starts[pair]:"),
    KernelFault("add_gradients", "subtracted", "+ tl.load(summand + at", "- tl.load(summand + at"),
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


def not_seen() -> list[str]:
    """The planted faults that no case shows. A fault may end its process, so each has one."""
    with tempfile.TemporaryDirectory() as folder:
        return [f"{fault.kernel}: {fault.what}" for fault in FAULTS if not _seen(fault, Path(folder))]


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
        os._exit(bool(differences(row, launch, torch.device("cpu"), torch.float32)))
    except Exception:
        os._exit(_RAISED)


def main() -> None:
    if "--faults" in sys.argv:
        print(json.dumps(not_seen()))
        return
    from support import product_cases

    cpu = torch.device("cpu")
    dtypes = (torch.float32, torch.float16)
    print(json.dumps(wrong(cpu, dtypes) + [text for dtype in dtypes for text in product_cases.wrong(cpu, dtype)]))


if __name__ == "__main__":
    main()
