"""Facts of every Triton kernel of the runtime, compiled for GPUs that are not here, and the table that holds them.

    python tests/support/kernel_facts.py            the facts, and what is wrong with them, as JSON; with --some every
                                                    fourth variant, for one capability
    python tests/support/kernel_facts.py --write    writes the table anew, if nothing breaks a promise

Compiled code goes to a temporary folder. A run is one process, because Triton decides at its first import whether it
interprets.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from schedc_runtime.kernels.registry import ROWS
from schedc_runtime.kernels.rows import PRODUCTS, KernelRow, Variant

TABLE = Path(__file__).parents[1] / "runtime" / "kernels" / "table.toml"
Facts = dict[str, int | str]
Place = tuple[int, ...]
"""The number of an argument, and of an entry of its tuple."""
PLANTED = 3
"""Kernels of `planted`."""


def compiled(kernel: Any, row: KernelRow, variant: Variant, capability: int, **options: Any) -> Any:
    """What Triton makes of a kernel's variant for a capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, known, divisible = arguments(kernel, row, variant)
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=known,
        attrs={} if variant.loose else {place: [["tt.divisibility", 16]] for place in divisible},
    )
    settings = {"enable_fp_fusion": False, "num_warps": variant.warps} | options
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings)


def arguments(kernel: Any, row: KernelRow, variant: Variant) -> tuple[dict[str, Any], dict[Any, Any], list[Place]]:
    """(types by argument, known values by place, places of multiples of 16) of a kernel's variant."""
    signature: dict[str, Any] = {}
    known: dict[Any, Any] = {}
    divisible: list[Place] = []
    for number, name in enumerate(kernel.arg_names):
        given = row.pointers.get(name, "i64" if name in row.long else "i32")
        count = variant.fixed.get("LEVELS", row.tuples.get(name, 0)) if name in row.tuples else 0
        types = []
        for entry in range(count or 1):
            word, place = (f"{name}.{entry}", (number, entry)) if count else (name, (number,))
            if word in variant.fixed:
                types.append("constexpr")
                known[place] = variant.fixed[word]
                continue
            types.append((given if isinstance(given, str) else given[entry]).replace("*T", f"*{variant.dtype}"))
            if not {name, word} & set(row.loose):
                divisible.append(place)
        signature[name] = tuple(types) if count else types[0]
    return signature, known, divisible


def facts_of(binary: Any, folder: Path) -> Facts:
    """Registers of a thread, bytes that it spills, shared bytes of a block, loads, fused multiply-adds, products."""
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    used = {word: int(count) for word, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    code = binary.asm["ptx"]
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "shared": binary.metadata.shared,
        "loads": len(re.findall(r"\bld\.global", code)),
        "vectors": len(re.findall(r"\bld\.global\S*\.v(?:4\.[bf]32|2\.[bf]64|8\.b16)|cp\.async\S*.*, 0x10", code)),
        "fused": len(re.findall(r"\bfma\.\S*f32", code)),
        "product": next((word for word in reversed(PRODUCTS.values()) if word in code), ""),
    }


def broken(row: KernelRow, variant: Variant, capability: int, facts: Facts) -> Iterator[str]:
    """The promises of the registry that a compiled variant does not keep."""
    where = f"{row.name}, {variant.name}, sm_{capability}"
    if facts["spilled"]:
        yield f"{where}: {facts['spilled']} bytes of each thread lie outside of registers"
    if facts["fused"] and not row.multiplies:
        yield f"{where}: {facts['fused']} fused multiply-adds, which round once where torch rounds twice"
    if not variant.loose and int(facts["vectors"]) < row.vectors:
        yield f"{where}: {facts['vectors']} loads of 16 bytes, and {row.vectors} streams"
    if row.multiplies and variant.dtype != "fp32" and facts["product"] != PRODUCTS[capability]:
        yield f"{where}: multiplies by `{facts['product']}`, not {PRODUCTS[capability]}"


def planted(folder: Path) -> list[str]:
    """Kernels that should be refused and are not: an annotation, 16,384 columns by one warp, fused multiply-adds."""
    from triton.compiler.errors import CompilationError

    rows = {row.name: row for row in ROWS}
    names = {"x": "*T", "output": "*T"}
    crowded = KernelRow("crowded", "", "", "", names, (Variant("bf16", "bf16", {"BLOCK": 16384}),))
    findings = []
    try:
        compiled(kernel_of("support.refused_kernels:annotated"), crowded, crowded.variants[0], 90)
        findings.append("an annotation `Any` compiles")
    except CompilationError as error:
        if "Any" not in str(error):
            raise
    backward = rows["swiglu_backward"]
    for row, kernel, words, options in (
        (crowded, "support.refused_kernels:crowded", "outside of registers", {"num_warps": 1}),
        (backward, backward.kernel, "fused multiply-adds", {"enable_fp_fusion": True}),
    ):
        variant = row.variants[0]
        facts = facts_of(compiled(kernel_of(kernel), row, variant, 90, **options), folder)
        if not any(words in text for text in broken(row, variant, 90, facts)):
            findings.append(f"{row.name}: not refused for {words}: {facts}")
    return findings


def kernel_of(name: str) -> Any:
    """The kernel that ``module:function`` names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def measured(some: bool = False) -> tuple[dict[str, Any], list[str]]:
    """(facts by kernel, variant and architecture; what breaks a promise or is not as the table says).

    some: the first variant of each kernel and every eighth, each for one architecture in turn.
    """
    import triton

    table: dict[str, Any] = {"triton": triton.__version__}
    findings: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for row in ROWS:
            for number, variant in enumerate(row.variants[:: 8 if some else 1], ROWS.index(row)):
                every = variant.capabilities
                for capability in [every[number % len(every)]] if some else every:
                    facts = facts_of(compiled(kernel_of(row.kernel), row, variant, capability), Path(folder))
                    findings += broken(row, variant, capability, facts)
                    table.setdefault(row.name, {}).setdefault(variant.name, {})[f"sm_{capability}"] = facts
        findings += planted(Path(folder))
    return table, findings


def changes(table: dict[str, Any], some: bool = False) -> list[str]:
    """What differs from the table in the file, which is of one version of Triton. some: not all were compiled."""
    kept = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    if kept["triton"] != table["triton"]:
        return []
    lines, before = set(written(table).splitlines()), set(written(kept).splitlines())
    return [f"`make kernels`: not in the table: {line}" for line in sorted(lines - before)] + [
        f"`make kernels`: only in the table: {line}" for line in sorted(before - lines) if not some
    ]


def written(table: dict[str, Any]) -> str:
    """The text of the table: a line for each compiled variant."""
    lines = ["# Facts of compiled kernels. `make kernels` writes this file.", f'triton = "{table["triton"]}"']
    for kernel, variants in table.items():
        if kernel == "triton":
            continue
        for variant, by_architecture in variants.items():
            lines += ["", f'[{kernel}."{variant}"]']
            for architecture, facts in by_architecture.items():
                shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in facts.items())
                lines.append(f"{architecture} = {{ {shown} }}")
    return "\n".join(lines) + "\n"


def answer_of(script: ModuleType, *options: str, interpreted: bool) -> Any:
    """What a script of kernels prints as JSON, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    call = [sys.executable, str(script.__file__), *options]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if not done.stdout:
        raise RuntimeError(f"{' '.join(call)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    some = "--some" in sys.argv
    table, findings = measured(some)
    if "--write" in sys.argv and not some and not findings:
        TABLE.write_text(written(table), encoding="utf-8")
    print(json.dumps({"table": table, "findings": findings + changes(table, some)}))
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
