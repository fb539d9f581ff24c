"""Lets the blocks of stages run with fused chains, tells what was fused where, and gives the blocks back."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from torch import fx, nn

from schedc.ir.plan import Fuse, Level
from schedc.model.fusions import FUSIONS, rows_of
from schedc_runtime.fusion.fused_forward import FusedForward, FusionRequest
from schedc_runtime.layer_levels import called_parts
from schedc_runtime.ranks.exchange import Exchange
from schedc_runtime.recompute.levels import put_forward, region_paths, take_forward
from schedc_runtime.stage.stage import Stage


class FusedStages:
    """The fused blocks of the stages of a process."""

    def __init__(self, fuse: Fuse, stages: Iterable[Stage], aliases: Mapping[str, str]) -> None:
        """aliases: names by which modules with several paths draw random numbers."""
        self.fuse, self.rows = fuse, rows_of(fuse.names)
        self._forwards: list[FusedForward] = []
        self._aliases, self._stages = aliases, list(stages)
        self._told = False
        for stage in self._stages:
            stage.fuse_segments(partial(self._segment, stage.index))
            level = stage.recomputation.level
            for path, part in _roots(stage, level):
                wanted = request(path, part, level, self.rows, fuse.compiled, aliases)
                self._record(stage, wanted)
                forward = FusedForward(part, wanted)
                if put_forward(part, forward):
                    self._forwards.append(forward)
                else:
                    warnings.warn(f"`{path}` has a forward of its own, and runs without fused chains", stacklevel=2)

    def _record(self, stage: Stage, wanted: FusionRequest) -> None:
        """Let a stage record what autograd saves, where rows of experts may be gathered again."""
        if "permute" in self.rows and wanted.doubtful:
            stage.recomputation.active = True

    def release(self) -> None:
        """Give the blocks their own forwards back."""
        for stage in self._stages:
            stage.fuse_segments(None)
        for forward in self._forwards:
            take_forward(forward.module, forward)
        self._forwards, self._stages = [], []

    def _segment(self, stage: int, segment: str, calls: nn.Module, drawn: str) -> FusedForward:
        """The forward of calls between the modules of a segment. drawn: the name for random numbers."""
        names = {"": drawn, **{path: self._aliases.get(path, path) for path, _ in calls.named_modules() if path}}
        name = f"{segment} of stage {stage}"
        wanted = FusionRequest(name, self.rows, self.fuse.compiled, frozenset(), frozenset(), names)
        forward = FusedForward(calls, wanted)
        self._forwards.append(forward)
        return forward

    def chains(self) -> dict[str, dict[str, int]]:
        """By block, or segment with chains, and row: the largest number of chains in a signature that ran."""
        told: dict[str, Counter[str]] = {}
        for forward in self._forwards:
            most: Counter[str] = Counter()
            for code in forward.codes.codes.values():
                most |= Counter(code.chains) if code is not None else Counter()
            if most or not isinstance(forward.module, fx.GraphModule):
                told.setdefault(forward.wanted.name, Counter()).update(most)
        return {name: dict(own) for name, own in told.items()}

    def told(self) -> list[str]:
        """A line for the blocks with the same chains, one for blocks without, and one for names without a chain."""
        by_chains: dict[str, list[str]] = {}
        for block, chains in self.chains().items():
            text = ", ".join(f"{row} {chains[row]}" for row in self.rows if row in chains)
            by_chains.setdefault(text, []).append(block)
        lines = [f"fused chains in {_listed(blocks)}: {text or 'none'}" for text, blocks in by_chains.items()]
        return [*lines, *([f"no chain for fuse {' '.join(idle)}"] if (idle := self.idle()) else [])]

    def idle(self) -> list[str]:
        """The names that a plan says, and that no block here has had a chain for."""
        total: Counter[str] = Counter()
        for chains in self.chains().values():
            total.update(chains)
        return [row for row in self.fuse.names if not total[row]]

    def warn_once(self) -> None:
        """Behind a step: warn of names that match nothing on this rank."""
        if not self._told and self._forwards and (idle := self.idle()):
            known = ", ".join(f"{name} ({FUSIONS[name].meaning})" for name in idle)
            warnings.warn(
                f"the plan fuses {known}, and no block of this rank has such a chain: leave the name out, or see"
                " pipe.report() for what was fused",
                stacklevel=3,
            )
        self._told = True


def _roots(stage: Stage, level: Level) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a stage's blocks whose code is made: a block, or what lies between its exchanges; and regions."""
    for block in stage.blocks:
        module = stage.module.get_submodule(block)
        paths = {id(part): path for path, part in module.named_modules()}
        called = [paths[id(part)] for part in called_parts(module)]
        regions = [
            path
            for path in region_paths(module, level)
            if path not in called and next(module.get_submodule(path).parameters(recurse=False), None) is None
        ]
        for inner in (*called, *regions):
            part = module.get_submodule(inner)
            if not type(part).__module__.startswith(("torch.nn.", "schedc_runtime.moe.")):
                yield f"{block}.{inner}" if inner else block, part


def request(
    path: str, part: nn.Module, level: Level, rows: tuple[str, ...], compile: bool, aliases: Mapping[str, str]
) -> FusionRequest:
    """What is fused in ``part`` of a stage that recomputes ``level``.

    Submodules with parameters of their own stay calls. So do regions of the level, across which nothing is fused.
    Stacked experts and RMSNorms are looked into where that works. Activation functions always are: what replaces them
    is a region of the same level.
    """
    opaque = {inner for inner in region_paths(part, level) if inner}
    doubtful: set[str] = set()
    for inner, module in part.named_modules():
        ours = type(module).__module__.startswith("schedc_runtime.moe.")  # these have regions inside
        own = list(module.parameters(recurse=False))
        if inner and (ours or own or isinstance(module, Exchange)):
            stacked = all(parameter.dim() == 3 for parameter in own)
            looked = bool(own) and not ours and (stacked or type(module).__name__.endswith("RMSNorm"))
            (doubtful if looked else opaque).add(inner)
    return FusionRequest(
        path, rows, compile, frozenset(opaque), frozenset(doubtful - opaque), _names(path, part, aliases)
    )


def _names(path: str, part: nn.Module, aliases: Mapping[str, str]) -> dict[str, str]:
    whole = {inner: f"{path}.{inner}".strip(".") for inner, _ in part.named_modules()}
    return {inner: aliases.get(name, name) for inner, name in whole.items()}


def _listed(blocks: list[str]) -> str:
    return f"`{blocks[0]}`" if len(blocks) == 1 else f"`{blocks[0]}` and {len(blocks) - 1} more"
