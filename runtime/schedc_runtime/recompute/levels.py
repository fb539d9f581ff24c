"""The levels of recomputation: which calls belong to which level, and which nodes of a stage run a second time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils import _pytree as pytree

from schedc.cell.graph import Node, StageShape
from schedc.cell.recomputed import EXPERTS, REPLAYED, SENDING, opened_cores, recomputed_nodes_of
from schedc.ir.plan import Level, Recompute
from schedc_runtime.errors import StageError
from schedc_runtime.ranks.exchange import Exchange
from schedc_runtime.recompute.activation_calls import ActivationCalls
from schedc_runtime.recompute.adaptive import Adaptive, Arrivals
from schedc_runtime.recompute.layers import ReplacedForward, restore_forwards
from schedc_runtime.recompute.regions import Recorder, region, region_of_attention, region_of_layer

if TYPE_CHECKING:
    from schedc_runtime.offload.microbatch import MicrobatchOffload

_MLP = ("mlp", "feed_forward", "ffn")
"""Names of the MLP in a dense block."""
_ATTENTION = ("attention", "attn", "self_attention", "self_attn")
"""Names of the attention in a block."""
_NEEDED = {
    Level.FULL: ("MLP", f"name the MLP of a block {', '.join(f'`{n}`' for n in _MLP)}, or write `recompute layer`"),
    Level.NORM: ("norm", "leave the line out, or give the class of a norm a name that ends in `Norm`"),
}
"""What a level runs a second time in a dense block, and what to do about a block without it."""


class Recomputation:
    """The recomputation of one stage, for all its microbatches.

    active: whether anything is recomputed or counted. adaptive: decides when to recompute; None if always. counted: the
    recorder of the microbatch that was forwarded last, with ``count``; another one's decisions are freed with it.
    level_of_layer: the level of a layer of the stage, by number; None where all have ``level``. layers: [nodes] number
    of the layer that each belongs to, -1 for none; empty where all have one level.
    recomputed: share of each node that cell programs run a second time, by node. replayed: the nodes among them that
    are called as a whole. cores: the segments of cores with exchanges inside.
    """

    def __init__(
        self,
        plan: Recompute,
        shape: StageShape | None,
        random: bool,
        layers: Sequence[int] = (),
        *,
        count: bool = False,
    ) -> None:
        self.level, self.random = plan.level, random
        self.counts = count
        self.active = count or plan.level is not Level.NONE
        self.counted: MicrobatchRecorder | None = None
        self.adaptive = None if plan.adaptive is None else Adaptive(plan.level, plan.adaptive, plan.by)
        self.level_of_layer = plan.of_layer if plan.layers else None
        self.layers = tuple(layers)
        self.recomputed = {} if shape is None else recomputed_nodes_of(plan, shape, layers)
        nodes = () if shape is None else shape.nodes
        self.cores = frozenset() if shape is None else opened_cores(shape)
        self.replayed = frozenset(node for node in self.recomputed if nodes[node].role in REPLAYED)

    def recorder(self, offload: MicrobatchOffload | None = None) -> MicrobatchRecorder:
        """A recorder for the next microbatch. offload: holds what may leave the device."""
        recorder = MicrobatchRecorder(self)
        recorder.offload = offload
        self.counted = recorder if self.counts else None
        return recorder


class MicrobatchRecorder(Recorder):
    """A `Recorder` that knows the decisions for its microbatch.

    level: the level, in this step, of parts that take no rows from other ranks; where layers have levels of their own,
    the highest. layer: the number, among MoE layers, of the node that runs forward now.
    """

    def __init__(self, recomputation: Recomputation) -> None:
        super().__init__(recomputation.random)
        self.plan = recomputation
        off = recomputation.adaptive is not None and not recomputation.adaptive.on
        self.level = Level.NONE if off else recomputation.level
        self.layer = -1
        self._decided: dict[int, Level] = {}

    @contextmanager
    def forwarding(self, node: int = -1, repeated: bool = False) -> Iterator[None]:
        if self.plan.layers:
            self.place = self.plan.layers[node] if node >= 0 else -1
        calls = ActivationCalls() if self.level >= Level.ACT else nullcontext()
        with calls, super().forwarding(node, repeated):
            yield

    def run_segment(self, node: int, run: Callable[..., tuple[Any, ...]], *taken: Any) -> tuple[Any, ...]:
        """``run(*taken)``, the forward of a segment. One of a core with exchanges inside is a region."""
        if node not in self.plan.cores:
            return run(*taken)
        leaves, form = pytree.tree_flatten(taken)
        again: tuple[Any, ...] = region(Level.LAYER, lambda *each: run(*pytree.tree_unflatten(each, form)), *leaves)
        return again

    def decide(self, arrivals: Callable[[], Arrivals], rank: int) -> None:
        """Decide for the layer that runs forward now, from the rows that come to its experts."""
        if self.plan.adaptive is not None:
            self._decided[self.layer] = self.plan.adaptive.decide(self.layer, arrivals(), rank)

    def of_rows(self, layer: int) -> Level:
        """The level at which the experts of a layer are recomputed."""
        return self._decided.get(layer, self.level)

    def runs(self, node: Node) -> bool:
        """Whether this microbatch recomputes ``node``, which may be recomputed."""
        if self.plan.level_of_layer is not None:
            return True  # the nodes of layers that recompute nothing are not among those that may be
        if node.role not in (EXPERTS, *SENDING):
            return self.level is not Level.NONE
        level = self.of_rows(node.layer)
        return level.exchanges if node.role in SENDING else level is not Level.NONE

    def covers(self, level: Level, rows: bool) -> bool:
        if self.plan.level_of_layer is not None:
            return level <= self.plan.level_of_layer(self.place)
        return level <= (self.of_rows(self.layer) if rows else self.level)


def install(module: nn.Module, blocks: Iterable[str] = ()) -> None:
    """Make regions of the norms, activation modules, attentions and dense MLPs inside ``module``, and of dense blocks.

    blocks: paths of the blocks in ``module``. Those that hold an exchange, or statistics that a second run would
    count, are no regions; the parts inside of them are.

    Layers of this package declare their regions themselves; `ActivationCalls` sees activation functions. Regions do
    nothing until a stage recomputes. `uninstall` removes them.
    """
    dense = [block for block in map(module.get_submodule, blocks) if _runs_twice(block)]
    regions = [(_call_of(level), layer) for level, layer in _regions(module)]
    for call, layer in [*((region_of_layer, block) for block in dense), *regions]:
        inner = layer.__dict__.get("forward")
        if inner is None or hasattr(inner, FUSED):
            layer.__dict__["forward"] = _RegionForward(layer, call, inner)


def check_repeated(module: nn.Module, blocks: Iterable[str], plan: Recompute, stage: int) -> None:
    """Check that blocks have an MLP for `Level.FULL`, and a norm for `Level.NORM`, which run a second time.

    blocks: paths of the stage's layers in ``module``. Raises `StageError` for blocks without it.
    """
    levels = {path: plan.of_layer(layer) for layer, path in enumerate(blocks)}
    for needed, (part, help) in _NEEDED.items():
        paths = [path for path, level in levels.items() if level is needed]
        found = [id(layer) for level, layer in _regions(module) if level is needed] if paths else []

        def has_part(layer: nn.Module, found: Collection[int] = found) -> bool:
            return isinstance(layer, Exchange) or id(layer) in found or hasattr(layer, "recomputed_from")

        lacking = [f"`{path}`" for path in paths if not any(map(has_part, module.get_submodule(path).modules()))]
        if lacking:
            raise StageError(f"stage {stage}: `recompute {needed}` finds no {part} in {', '.join(lacking)}", help)


def uninstall(module: nn.Module) -> None:
    """Undo `install`."""
    restore_forwards(module, _RegionForward)


FUSED = "is_fused"
"""Attribute of a replaced forward that gives what the class's own gives, and may lie inside of a region."""


def put_forward(part: nn.Module, forward: Any) -> bool:
    """Let ``part`` run ``forward`` within its layer and region; False where it has a forward of its own already."""
    before = part.__dict__.get("forward")
    while isinstance(before, ReplacedForward) and before.inner is not None:
        before = before.inner
    if isinstance(before, ReplacedForward):
        before.inner = forward
    elif before is None:
        part.__dict__["forward"] = forward
    else:
        return False
    return True


def take_forward(part: nn.Module, forward: Any) -> None:
    """Undo `put_forward`."""
    before = part.__dict__.get("forward")
    if before is forward:
        del part.__dict__["forward"]
    while isinstance(before, ReplacedForward):
        if before.inner is forward:
            before.inner = None
        before = before.inner


class _RegionForward(ReplacedForward):
    """Calls the forward as a region."""


def _runs_twice(block: nn.Module) -> bool:
    return not any(isinstance(part, Exchange) or hasattr(part, "num_batches_tracked") for part in block.modules())


def _call_of(level: Level) -> Callable[..., Any]:
    """What calls a part of a layer as a region of ``level``."""
    return region_of_attention if level is Level.LAYER else partial(region, level)


def _regions(module: nn.Module) -> Iterator[tuple[Level, nn.Module]]:
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) or type(layer).__name__.endswith("Norm"):
            yield Level.NORM, layer
        elif type(layer).__name__.endswith("Activation"):
            yield Level.ACT, layer
        elif name.rpartition(".")[2] in _MLP and not any(isinstance(part, Exchange) for part in layer.modules()):
            yield Level.FULL, layer
        elif name.rpartition(".")[2] in _ATTENTION and _runs_twice(layer):
            yield Level.LAYER, layer


def dense_mlps(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, MLP) of the modules that `Level.FULL` runs a second time outside of layers with experts."""
    return (
        (path, module.get_submodule(path)) for path in region_paths(module, Level.FULL) if path.split(".")[-1] in _MLP
    )


def region_paths(module: nn.Module, level: Level) -> list[str]:
    """The paths, from ``module`` on, of the norms, attentions and dense MLPs that are regions at ``level``."""
    names = {id(part): path for path, part in module.named_modules()}
    return [names[id(part)] for own, part in _regions(module) if own <= level and own is not Level.ACT]


def draws(module: nn.Module) -> bool:
    """Whether a layer has dropout: a dropout module, or a probability that it passes on."""
    return any(
        "dropout" in f"{type(layer).__name__}.{name}".lower() and isinstance(value, float) and value > 0
        for layer in module.modules()
        for name, value in vars(layer).items()
    )
