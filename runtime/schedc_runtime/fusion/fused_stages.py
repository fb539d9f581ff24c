"""Lets the blocks of stages run with fused chains, tells what was fused where, and gives the blocks back."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from schedc.attachments.fusions import FUSIONS, fused_names
from schedc.attachments.values import Fuse, Level
from schedc_runtime.fusion.fused_forward import FusedForward, FusionRequest
from schedc_runtime.ranks.exchange import Exchange
from schedc_runtime.recompute.layers import called_parts
from schedc_runtime.recompute.levels import put_forward, region_paths, take_forward
from schedc_runtime.stage.stage import Stage


class FusedStages:
    """The fused blocks of the stages of a process."""

    def __init__(self, fuse: Fuse, stages: Iterable[Stage], aliases: Mapping[str, str]) -> None:
        """aliases: names by which modules with several paths draw random numbers."""
        self.fuse, self.rows = fuse, fused_names(fuse)
        self._forwards: list[FusedForward] = []
        self._told = False
        for stage in stages:
            level = stage.recomputation.level
            for path, part in _roots(stage, level):
                wanted = FusionRequest(
                    path, self.rows, fuse.compiled, frozenset(opaque_parts(part, level)), _names(path, part, aliases)
                )
                forward = FusedForward(part, wanted)
                if put_forward(part, forward):
                    self._forwards.append(forward)
                else:
                    warnings.warn(f"`{path}` has a forward of its own, and runs without fused chains", stacklevel=2)

    def release(self) -> None:
        """Give the blocks their own forwards back."""
        for forward in self._forwards:
            take_forward(forward.module, forward)
        self._forwards = []

    def chains(self) -> dict[str, dict[str, int]]:
        """By block and row the largest number of chains in a signature that ran."""
        told: dict[str, dict[str, int]] = {}
        for forward in self._forwards:
            own = told.setdefault(forward.wanted.name, {})
            for code in forward.codes.codes.values():
                for row, count in code.chains.items() if code is not None else ():
                    own[row] = max(own.get(row, 0), count)
        return told

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


def opaque_parts(part: nn.Module, level: Level) -> Iterator[str]:
    """Submodules that stay calls: with parameters of their own, and regions of a level, across which nothing is fused.

    Activation functions are looked into: what replaces them is a region of the same level.
    """
    for path, inner in part.named_modules():
        own = next(inner.parameters(recurse=False), None) is not None or isinstance(inner, Exchange)
        if path and (own or type(inner).__module__.startswith("schedc_runtime.moe.")):  # these have regions inside
            yield path
    yield from (path for path in region_paths(part, level) if path)


def _names(path: str, part: nn.Module, aliases: Mapping[str, str]) -> dict[str, str]:
    whole = {inner: f"{path}.{inner}" if inner else path for inner, _ in part.named_modules()}
    return {inner: aliases.get(name, name) for inner, name in whole.items()}


def _listed(blocks: list[str]) -> str:
    return f"`{blocks[0]}`" if len(blocks) == 1 else f"`{blocks[0]}` and {len(blocks) - 1} more"
