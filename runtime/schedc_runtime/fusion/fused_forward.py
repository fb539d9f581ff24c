"""Replaces the forward of a module by code in which chains of operations are fused, by signature."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.dropout import _DropoutNd as _Dropout
from torch.utils import _pytree as pytree

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.fusion.patterns import Match
from schedc_runtime.fusion.recording import WITHIN, isolated, record_module
from schedc_runtime.fusion.rows import Rewrite, matches
from schedc_runtime.partition.effects import ambient
from schedc_runtime.partition.structure import Template
from schedc_runtime.partition.unit_calls import CompiledGraph, compiled_code
from schedc_runtime.random_numbers.names import NamedCall


@dataclass(frozen=True)
class FusedCode:
    """The code of a forward. chains: number of chains of each row. saved_bytes: held bytes that chains save."""

    code: CompiledGraph
    output: Template
    chains: Mapping[str, int]
    saved_bytes: int

    def __call__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of the forward on arguments of the signature."""
        leaves = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, Tensor)]
        return self.output.fill(iter(self.code.run(module, *leaves)))


def fused_code(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: FusionRequest
) -> FusedCode | None:
    """The code of ``module`` for arguments like these; None where it has no chain. `FusionRequest.doubtful` is ignored.

    Only submodules that hold a part of a chain become code: hooks, regions and names of all others stay.
    """
    whole = {path for path, _ in module.named_modules() if not _inside(path, wanted.opaque)}
    record = record_module(module, args, kwargs, whole, wanted.names)
    pairs = _matches(record.graph, wanted.rows)
    if not pairs:
        return None
    through = {"", *(path for _, match in pairs for path in _paths(match))}
    if through != whole:
        record = record_module(module, args, kwargs, through, wanted.names)
    chains: Counter[str] = Counter()
    saved = 0
    for rewrite, match in _matches(record.graph, wanted.rows):
        saved += rewrite.saved_bytes(match)
        chains[rewrite.row] += 1
        _replace(record.graph, rewrite, match, wanted.compile)
    return FusedCode(compiled_code(record.graph, f"fused {type(module).__name__}"), record.output, dict(chains), saved)


def _matches(graph: fx.Graph, rows: tuple[str, ...]) -> list[tuple[Rewrite, Match]]:
    return [(rewrite, match) for rewrite, match in matches(graph, rows) if _same_layout(rewrite, match)]


def _same_layout(rewrite: Rewrite, match: Match) -> bool:
    """Whether the replacement gives a tensor of the same sizes, strides and dtype: later sums keep their order."""
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


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_MOST = 64
"""Signatures of a module that have code: lengths of sequences, modes, and what code calls it with."""
TORCH_ERRORS = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, AssertionError)
"""What a forward may raise on fake tensors."""


class FusedCodes:
    """The code of a module by signature, which copies of the module share. reasons: why a signature has none."""

    def __init__(self) -> None:
        self.codes: dict[Any, FusedCode | None] = {}
        self.reasons: list[str] = []

    def __deepcopy__(self, memo: Any) -> FusedCodes:
        return self

    def __reduce__(self) -> tuple[type[FusedCodes], tuple[()]]:
        return FusedCodes, ()  # a stored module makes its code anew


class FusionRequest(NamedTuple):
    """What is fused in a module, which is called ``name``.

    rows: names of the table. compile: whether torch.compile makes the kernels. opaque: paths of submodules that are not
    looked into. doubtful: those that are looked into only if fake tensors can run their code. names: by path, the names
    by which submodules draw random numbers.
    """

    name: str
    rows: tuple[str, ...]
    compile: bool
    opaque: frozenset[str]
    doubtful: frozenset[str]
    names: Mapping[str, str]


class FusedForward:
    """A module's replaced forward. An object and not a closure: a deep copy of the module copies it too."""

    is_fused = True

    def __init__(self, module: nn.Module, wanted: FusionRequest) -> None:
        self.module, self.wanted, self.codes = module, wanted, FusedCodes()
        self._modes = [part for part in module.modules() if next(part.parameters(recurse=False), None) is None]
        """Modules whose mode, and rate of dropout, the code may depend on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        signature = self._signature(args, kwargs)
        if signature is None:
            return self._plain(args, kwargs)
        codes = self.codes.codes
        if signature not in codes:
            codes[signature] = self._made(args, kwargs)
        code = codes[signature]
        return self._plain(args, kwargs) if code is None else code(self.module, args, kwargs)

    def _plain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)

    def _signature(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the code depends on; None for arguments of a recording, and for others that code cannot be made for."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if isinstance(leaf, FakeTensor):
                    return None
                key.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
            elif isinstance(leaf, fx.Proxy):
                return None
            elif isinstance(leaf, _PLAIN):
                key.append((type(leaf), leaf))
            else:
                self._reason(f"an argument of the class {type(leaf).__name__}")
                return None
        modes = tuple([(part.training, part.p if isinstance(part, _Dropout) else None) for part in self._modes])
        return structure, tuple(key), modes, ambient().autocast

    def _made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FusedCode | None:
        wanted = self.wanted
        if len(self.codes.codes) >= _MOST:
            self._reason(f"more than {_MOST} kinds of arguments: only the first ones have code")
            return None
        if hooked := [path for path, part in self.module.named_modules() if path and _hooked(part)]:
            self._reason(f"`{hooked[0]}` has hooks")
            return None
        try:
            return made(self.module, args, kwargs, wanted)
        except (RuntimeFault, *TORCH_ERRORS) as error:
            self._reason((str(error).splitlines() or [type(error).__name__])[0])
            return None

    def _reason(self, reason: str) -> None:
        if reason not in self.codes.reasons:
            self.codes.reasons.append(reason)
            warnings.warn(f"`{self.wanted.name}` runs without fused chains: {reason}", stacklevel=2)


def made(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: FusionRequest) -> FusedCode | None:
    """The code of ``module`` for arguments like these; None where it has no chain. Raises what its recording raises."""

    def make(opaque: frozenset[str]) -> FusedCode | None:
        return isolated(lambda: fused_code(module, args, kwargs, wanted._replace(opaque=opaque)))

    if wanted.doubtful:
        with suppress(RuntimeFault, *TORCH_ERRORS):
            return make(wanted.opaque)
    return make(wanted.opaque | wanted.doubtful)


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
