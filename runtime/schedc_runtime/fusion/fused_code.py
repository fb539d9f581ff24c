"""Makes code of a module's forward in which chains of operations are replaced, for one signature of its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from schedc_runtime.fusion.patterns import Match
from schedc_runtime.fusion.recording import WITHIN, record_module
from schedc_runtime.fusion.rows import Rewrite, matches
from schedc_runtime.partition.stage_code import CompiledGraph, compiled_code
from schedc_runtime.partition.structure import Template
from schedc_runtime.random_numbers.names import NamedCall


@dataclass(frozen=True)
class FusedCode:
    """The code of a forward. chains: number of chains of each row. saved_bytes: bytes that they no longer hold."""

    code: CompiledGraph
    output: Template
    chains: Mapping[str, int]
    saved_bytes: int

    def __call__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of the forward on arguments of the signature."""
        leaves = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, Tensor)]
        return self.output.fill(iter(self.code.run(module, *leaves)))


def fused_code(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: tuple[str, ...],
    compile: bool,
    opaque: Collection[str],
    names: Mapping[str, str],
) -> FusedCode | None:
    """The code of ``module`` for arguments like these; None where it has no chain of ``rows``.

    opaque: paths of submodules that are called and not looked into. names: as for `record_module`. Only submodules that
    hold a part of a chain become code: hooks, regions and names of all others stay.
    """
    whole = {path for path, _ in module.named_modules() if not _inside(path, opaque)}
    record = record_module(module, args, kwargs, whole, names)
    pairs = _matches(record.graph, rows)
    if not pairs:
        return None
    through = {"", *(path for _, match in pairs for path in _paths(match))}
    if through != whole:
        record = record_module(module, args, kwargs, through, names)
    chains: Counter[str] = Counter()
    saved = 0
    for rewrite, match in _matches(record.graph, rows):
        saved += rewrite.saved_bytes(match)
        chains[rewrite.row] += 1
        _replace(record.graph, rewrite, match, compile)
    return FusedCode(compiled_code(record.graph, f"fused {type(module).__name__}"), record.output, dict(chains), saved)


def _matches(graph: fx.Graph, rows: tuple[str, ...]) -> list[tuple[Rewrite, Match]]:
    return [(rewrite, match) for rewrite, match in matches(graph, rows) if _same_layout(rewrite, match)]


def _same_layout(rewrite: Rewrite, match: Match) -> bool:
    """Whether the replacement gives a tensor of the same sizes, strides and dtype: sums over it keep their order."""
    function, args = rewrite.replacement(match, False)
    given = fx.node.map_arg(args, lambda node: node.meta["val"])
    output, own = function(*given), match.result.meta["val"]
    return (output.shape, output.stride(), output.dtype) == (own.shape, own.stride(), own.dtype)


def _inside(path: str, opaque: Collection[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in opaque)


def _paths(match: Match) -> set[str]:
    """The modules whose code holds a part of a chain, and those around them."""
    return {path for node in match.nodes for path in node.meta.get(WITHIN, ())}


def _replace(graph: fx.Graph, rewrite: Rewrite, match: Match, compile: bool) -> None:
    function, args = rewrite.replacement(match, compile)
    drawn = [node.target.name for node in match.nodes if isinstance(node.target, NamedCall)]
    target: Any = NamedCall(drawn[0], function) if drawn else function
    with graph.inserting_before(match.result):
        node = graph.create_node("call_function", target, args, {}, rewrite.row)
    node.meta |= {"val": match.result.meta["val"]}
    if (ambient := match.result.meta.get("ambient")) is not None:
        node.meta["ambient"] = ambient
    match.result.replace_all_uses_with(node)
    for old in reversed(match.nodes):
        graph.erase_node(old)
