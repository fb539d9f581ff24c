"""Every Triton kernel of the runtime: compiled for GPUs that are not here, and its numbers in Triton's interpreter."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import schedc_runtime
from runtime.moe import triton_cases

PACKAGE = Path(schedc_runtime.__file__).parent
CAPABILITIES = (80, 90, 100)

pytestmark = [
    pytest.mark.skipif(os.environ.get("SCHEDC_BARE") == "1", reason="bare environment"),
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="Triton has wheels for linux-x86_64"
    ),
]


def modules() -> list[ModuleType]:
    """The files of the runtime that have kernels."""
    files = [path for path in PACKAGE.rglob("*.py") if "@triton.jit" in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    return [importlib.import_module(name) for name in names]


def compiled(kernel: Any, module: ModuleType, capability: int, dtype: str, *, aligned: bool) -> Any:
    """A kernel for tensors of ``dtype``. aligned: columns lie side by side, and all else is a multiple of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tiles = {"TILE_ROWS": module.ROWS, "TILE_COLUMNS": module.COLUMNS, "TILE_INNER": module.INNER}
    near = dict.fromkeys(("left_column", "right_column"), 1) if aligned else {}
    fixed = {name: value for name, value in (tiles | near).items() if name in kernel.arg_names}
    types = {"left": f"*{dtype}", "right": f"*{dtype}", "output": f"*{dtype}", "ends": "*i32"}
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}
    multiples = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if aligned and name not in fixed and name != "experts"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=multiples)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=module.OPTIONS)


def spilled(binary: bytes, folder: Path) -> str:
    """What a kernel keeps outside of registers, as `cuobjdump` says it; empty for nothing."""
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    words = [word for word in text.split() if word.startswith(("STACK:", "LOCAL:"))]
    assert len(words) == 2
    return " ".join(word for word in words if not word.endswith(":0"))


def test_kernels_compile_for_every_capability_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    count = 0
    for module in modules():
        kernels = [each for each in vars(module).values() if isinstance(each, JITFunction)]
        assert len(kernels) == Path(str(module.__file__)).read_text(encoding="utf-8").count("@triton.jit")
        for kernel in kernels:
            for capability in CAPABILITIES:
                for dtype in ("bf16", "fp32", *["fp16"][: capability == 90]):
                    binary = compiled(kernel, module, capability, dtype, aligned=dtype == "bf16").asm["cubin"]
                    assert spilled(binary, tmp_path) == "", (kernel, capability, dtype)
                    count += 1
    assert count >= 14


def test_numbers_in_the_interpreter_are_those_of_the_loop() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = [sys.executable, triton_cases.__file__]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_on_a_gpu_are_those_of_the_loop() -> None:
    assert [x for dtype in triton_cases.BOUNDS for x in triton_cases.wrong(torch.device("cuda"), dtype)] == []
