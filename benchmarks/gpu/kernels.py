"""Section `kernels`: our own kernels against their twins in torch. Without a GPU Triton's interpreter runs them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from gpu.claims import Bound, Claim
from gpu.setting import NotMeasured, Setting
from schedc_runtime.kernels.registry import ROWS
from support import kernel_numbers
from support.kernel_facts import answer_of

CLAIMS = (
    Claim(
        "our own kernels have the numbers of their twins, and their bits where these are promised",
        "every row of `kernels/registry.py`; on a GPU all types, interpreted float32 and float16",
        (Bound("kernels.wrong", "==", 0), Bound("kernels.kernels", ">=", 5)),
        on_cpu=True,
        must=True,
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    if find_spec("triton") is None:
        raise NotMeasured("no triton")
    if setting.gpu:
        wrong = kernel_numbers.wrong(setting.device, tuple(kernel_numbers.EPSILON))
    else:
        wrong = answer_of(kernel_numbers, interpreted=True)
    return {"kernels": {"kernels": len(ROWS), "wrong": len(wrong), "which": wrong[:8]}}
