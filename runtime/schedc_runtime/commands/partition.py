"""`schedc partition`: prints how a model is cut into stages, and what crosses, without weights and without a run."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import Level
from schedc.model.fusions import FUSIONS
from schedc.units import shown
from schedc_runtime.commands.options import report_failure
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.fusion.fused_forward import TORCH_ERRORS, made
from schedc_runtime.fusion.fused_stages import request
from schedc_runtime.partition import Partition, partition
from schedc_runtime.partition.boundary import Boundary, Constant, TensorSpec
from schedc_runtime.partition.recorded_stage import RecordedStage
from schedc_runtime.ranks.exchange import Exchange

_TENSOR = re.compile(r"(?:(\w+)=)?(\w+)\[([\d, ]*)\]")


def main() -> int:
    """Cut the model, print the stages, and write a picture if one was asked for."""
    parser = argparse.ArgumentParser(prog="schedc partition")
    parser.add_argument("model", help="module:function, called without arguments on the meta device")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--example", action="append", default=[], metavar="[NAME=]DTYPE[SIZES]")
    parser.add_argument("--split-point", action="append", default=[], metavar="SUBMODULE")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.gv")
    options = parser.parse_args()
    try:
        sys.path.insert(0, "")
        parts = _cut(options.model, options.stages, options.example, options.split_point)
        print("\n".join(partition_report(parts)))
        if options.output is not None:
            from schedc_runtime.partition.picture import partition_graph  # needs the package graphviz

            record = parts.records.current
            graph = partition_graph(parts, record.boundaries if record else None)
            options.output.write_text(graph.source, encoding="utf-8")
    except (RuntimeFault, DiagnosticError) as error:
        return report_failure(error)
    return 0


def partition_report(parts: Partition) -> Iterator[str]:
    """The lines of a cut: each stage with its units and parameters, and below it what crosses to the next."""
    record = parts.records.current
    assert record is not None
    entries = [f"{name} {entry}" for name, entry in zip(record.inputs, record.boundaries[0].entries, strict=False)]
    yield f"recorded with {', '.join(entries)}"
    for stage, (module, units) in enumerate(zip(parts.modules, parts.blocks, strict=True)):
        held = {id(p): p for p in module.parameters()}.values()
        numbers, size = sum(p.numel() for p in held), sum(p.numel() * p.element_size() for p in held)
        others = sorted({_outside(name, units) for name, _ in module.named_parameters()} - {""})
        yield f"stage {stage}: {numbers:,} parameters, {shown(size)}"
        yield f"  units: {', '.join(units) or 'none'}"
        if others:
            yield f"  beside them: {', '.join(others)}"
        yield from (f"  chains that `fuse auto` takes: {text}" for text in told_chains(module, units))
        if stage + 1 < parts.stages:
            yield from _crossing(record.boundaries[stage + 1], record.values[stage])
    if record.assumed:
        yield f"taken to give the shape of their first argument: {', '.join(record.assumed)}"


def example_of(texts: Sequence[str]) -> Any:
    """The example of texts such as ``ids=int64[2, 16]``: by name, or by position; None for no text."""
    named: dict[str, TensorSpec] = {}
    rest: list[TensorSpec] = []
    for text in texts:
        parsed = _TENSOR.fullmatch(text)
        dtype = getattr(torch, parsed[2], None) if parsed else None
        if parsed is None or not isinstance(dtype, torch.dtype):
            raise RuntimeFault(f"--example {text}: not a tensor", "write --example 'input_ids=int64[2, 16]'")
        spec = TensorSpec(tuple(int(size) for size in parsed[3].split(",") if size.strip()), dtype)
        if parsed[1]:
            named[parsed[1]] = spec
        else:
            rest.append(spec)
    if named and rest:
        raise RuntimeFault("--example with names and without", "name all tensors of the example, or none")
    return named or tuple(rest) or None


def _cut(name: str, stages: int, example: Sequence[str], split_points: Sequence[str]) -> Partition:
    module, _, function = name.partition(":")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RuntimeFault(f"{name}: {error}", "give MODULE:FUNCTION, importable from this folder") from error
    with torch.device("meta"):
        model = make()
    return partition(model, stages, split_points=split_points or None, example=example_of(example))


def _crossing(boundary: Boundary, names: Sequence[str]) -> Iterator[str]:
    """What goes to the next stage, per microbatch of the example."""
    for name, entry in zip(names, boundary.entries, strict=True):
        assert not isinstance(entry, Constant)
        back = ", and its gradient back" if entry.differentiable else ""
        yield f"    -> {name}: {entry}, {shown(prod(entry.shape) * entry.dtype.itemsize)}{back}"


def _outside(parameter: str, units: Sequence[str]) -> str:
    """The module of a parameter that is in no unit."""
    return "" if any(parameter.startswith(f"{unit}.") for unit in units) else parameter.rpartition(".")[0] or parameter


def told_chains(stage: nn.Module, units: Sequence[str]) -> Iterator[str]:
    """A line for the units of a stage that have the same chains: ``rope 2, gated 1 in 4 units``.

    It is for the signature recorded last. Units with exchanges, and those that cannot be recorded from inside, are left
    out.
    """
    assert isinstance(stage, RecordedStage)
    total: Counter[str] = Counter()
    for node in stage.current.graph.nodes:
        if node.op != "call_module" or node.target not in units:
            continue
        module = stage.get_submodule(str(node.target))
        if any(isinstance(part, Exchange) for part in module.modules()):
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda given: given.meta["val"])
        wanted = request("", module, Level.NONE, tuple(FUSIONS), False, {})
        try:
            code = made(module, args, kwargs, wanted)
        except (KeyError, RuntimeFault, *TORCH_ERRORS):
            continue
        if code is not None:
            total[", ".join(f"{row} {code.chains[row]}" for row in FUSIONS if row in code.chains)] += 1
    for text, count in total.items():
        yield f"{text} in {count} unit{'s' if count > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
