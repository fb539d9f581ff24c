"""Every Triton kernel of the runtime: compiled for GPUs that are not here, and its numbers in Triton's interpreter."""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch

import schedc_runtime
from schedc_runtime.kernels.library import OPERATIONS
from schedc_runtime.kernels.registry import ROWS
from schedc_runtime.kernels.rows import CAPABILITIES
from schedc_runtime.triton_kernels.numbers import veiled
from support import kernel_facts, kernel_numbers, product_cases
from support.kernel_facts import answer_of
from support.needs import BARE
from support.sweeps import in_sweeps, swept

PACKAGE = Path(schedc_runtime.__file__).parent

pytestmark = [
    pytest.mark.skipif(BARE, reason="bare environment"),
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="Triton has wheels for linux-x86_64"
    ),
]


@pytest.mark.slow
@pytest.mark.sweep
def test_kernels_compile_and_are_as_the_table_says() -> None:
    """The reduced form compiles every eighth variant for one capability."""
    answer = answer_of(kernel_facts, *swept((), ("--some",)), interpreted=False)
    assert answer["findings"] == []
    told = {capability for row in ROWS for each in answer["table"][row.name].values() for capability in each}
    assert told == {f"sm_{capability}" for capability in CAPABILITIES}


def test_the_table_has_every_variant_for_its_capabilities() -> None:
    table = tomllib.loads(kernel_facts.TABLE.read_text(encoding="utf-8"))
    for row in ROWS:
        told = {name: set(each) for name, each in table[row.name].items()}
        assert told == {
            variant.name: {f"sm_{capability}" for capability in variant.capabilities} for variant in row.variants
        }


def test_every_kernel_has_a_row() -> None:
    kernels = {
        f"schedc_runtime.triton_kernels.{path.stem}:{name}"
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"@triton.jit.*\ndef (\w+)", path.read_text(encoding="utf-8"))
    }
    assert {row.kernel for row in ROWS} <= kernels
    parts = {"_with_bias", "_bag", "_key", "_value", "_numbers", "_sort", "_tell", "_of_normal", "_turn"}
    parts |= {"_sum", "_of_quotient", "_strength", "_overflows", "_whole", "no_more", "_level", "_counted"}
    parts |= {"_owner", "_starts", "_fan", "_emptied", "_source", "_exact", "_lesser", "_nobody", "_ends", "_runs"}
    assert {name.partition(":")[2] for name in kernels - {row.kernel for row in ROWS}} == parts


def test_veiled_numbers_are_never_compiled_for() -> None:
    numbers = range(-40, 40)
    assert [number for number in veiled(numbers) if number % 16 == 0 or number == 1] == []
    assert [number >> 4 for number in veiled(numbers)] == list(numbers)


def test_operations_have_a_kernel() -> None:
    for name in ("models.moe_transformer", *(f"kernels.{path.stem}" for path in (PACKAGE / "kernels").glob("*.py"))):
        import_module(f"schedc_runtime.{name}")
    assert [name for name, launch in OPERATIONS.items() if not launch] == []
    assert {launch for launch in OPERATIONS.values() if launch} == {row.launch for row in ROWS if row.twin}


@pytest.mark.sweep
@pytest.mark.slow
def test_numbers_in_the_interpreter_are_those_of_the_twins() -> None:
    assert answer_of(kernel_numbers, *swept((), ("--some",)), interpreted=True) == []


@in_sweeps("test_numbers_in_the_interpreter_are_those_of_the_twins")
@pytest.mark.slow
def test_planted_faults_change_numbers() -> None:
    assert answer_of(kernel_numbers, "--faults", "--first", interpreted=True) == []


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_on_a_gpu_are_those_of_the_twins() -> None:
    device, dtypes = torch.device("cuda"), tuple(kernel_numbers.EPSILON)
    assert kernel_numbers.wrong(device, dtypes) == []
    assert [text for dtype in product_cases.BOUNDS for text in product_cases.wrong(device, dtype)] == []
