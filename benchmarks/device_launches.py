"""Counts what one MoE block launches per microbatch and rank, forward and backward, and which numbers it uploads.

Counted: the operations that a dispatch mode sees. Views and allocations launch nothing. An operation of ours (namespace
``schedc``) counts as the launches of its kernel, which the registry names. An operation of torch counts as the kernels
of a GPU. A step of two blocks less a step of one, with four microbatches and with two, gives the launches of a block:
those of embedding, head, loss and report fall out. An upload makes a tensor of a device from numbers of Python. Groups
follow from the innermost file of the package that ran.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime import Pipeline
from schedc_runtime.kernels.registry import ROWS
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.capacity import ExpertCapacity
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.ranks.expert_group import ExpertGroup
from support.expert_cases import compiled
from support.runtime_cases import next_token_loss

ROUTERS = {
    "softmax": RouterConfig(8, 2),
    "shares": RouterConfig(8, 2, normalise=False),
    "groups": RouterConfig(8, 2, scores="sigmoid", scale=2.5, groups=4, limit=2, biased=True),
    "balanced": RouterConfig(8, 2, scores="sigmoid", scale=2.5, groups=4, limit=2, biased=True, balance=1e-3),
}
LAYER = {"softmax": 40, "shares": 40, "groups": 40, "balanced": 48}
BLOCK = {"softmax": 110, "shares": 110, "groups": 110, "balanced": 118}
"""The most launches of a MoE layer, and of its block with `FUSED`, by router, with sizes of any kind. An
auxiliary loss may take eight more."""
SIZES = {
    "exact": "  alltoall flat\n",
    "capacity": "  alltoall flat\n  capacity 1.25\n",
    "bounded": "  alltoall flat\n  sizes bounded 4\n",
}
REPEATED = "  alltoall flat\n  sizes bounded 1\n"
"""Bounds that a step exceeds, which is then run again."""
FUSED = "  fuse auto compiled\n"

GROUPS = {
    "moe/router.py": "router", "moe/counts.py": "counts", "moe/planner.py": "counts", "moe/capacity.py": "counts",
    "moe/trees.py": "trees", "moe/bags.py": "bags", "moe/routes.py": "trees", "moe/sizes.py": "sizes",
    "moe/experts.py": "experts", "moe/products.py": "experts", "moe/stacked_linear.py": "experts",
    "moe/balance.py": "balance", "stage/additions.py": "sums of gradients", "stage/engine.py": "backwards",
    "stage/backward.py": "backwards", "models/moe_transformer.py": "attention and norms",
    "random_numbers/interception.py": "attention and norms", "pipeline/step/contexts.py": "contexts",
    "moe/layer.py": "shared expert",
}  # fmt: skip
FOLDERS = {"segments": "segments", "fusion": "attention and norms", "moe": "others of the layer"}
OF_LAYER = {
    "router", "counts", "trees", "bags", "sizes", "experts", "balance", "others of the layer", "shared expert",
}  # fmt: skip


class Launch(NamedTuple):
    """name: of the operation. file: the innermost file of the package, and its line."""

    name: str
    file: str
    line: int


class Launches(TorchDispatchMode):
    """Counts the operations of a call, and uploads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Launch] = Counter()
        self.uploads: Counter[Launch] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name == "lift_fresh":
            self.uploads[_launch(name)] += args[0].dim() > 0
        elif not (func.is_view or name in _NOTHING):
            self.seen[_launch(name)] += _KERNELS.get(name, 1)
        return result


_NOTHING = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "set_",
    "_reshape_alias", "_local_scalar_dense", "promote_types",
}  # fmt: skip
"""Allocations, views and questions of dtype, which launch nothing; and a copy to the host."""


_KERNELS = {f"schedc::{row.name}": row.launches for row in ROWS}
_KERNELS["_scaled_dot_product_flash_attention_for_cpu_backward"] = 3  # products by row, gradients, and their rounding
"""Launches of operations that a GPU may run as several kernels."""


def _launch(name: str) -> Launch:
    frame: Any = sys._getframe(2)
    while frame is not None:
        _, found, file = frame.f_code.co_filename.partition("schedc_runtime/")
        if found and not file.startswith("kernels/"):
            return Launch(name, file, frame.f_lineno)
        frame = frame.f_back
    return Launch(name, "", 0)


def step(lines: str, router: RouterConfig, blocks: int, microbatches: int) -> Launches:
    """What the third step of a model launches, whose gradients and buffers are there.

    Values are as wide as keys: a CPU has attention as one operation only then, and a GPU always.
    """
    groups = f" groups {router.groups} limit {router.limit}" if router.groups > 1 else ""
    plan = f"  experts 8 top 2{groups}\n  topology nodes 1 x 1\n{lines}"
    program = compiled("1f1b", {"P": 1, "M": microbatches}, plan, str(blocks))
    torch.manual_seed(0)
    narrow = {"width": 16, "heads": 2, "inner": 16, "expert_inner": 8, "query_rank": 8, "key_value_rank": 8, "plain": 8}
    config = MoEConfig(32, dense_blocks=0, moe_blocks=blocks, routing=router, **narrow)
    batch = torch.arange(microbatches * 8).view(microbatches, 8) * 7 % 32
    pipe = Pipeline(MoETransformer(config), program, loss_fn=next_token_loss, in_process=True, example=batch)
    for _ in range(2):
        pipe.step(batch, batch)
    launches = Launches()
    with launches:
        pipe.step(batch, batch)
    pipe.close()
    return launches


class OfBlock(NamedTuple):
    """Launches and uploads of a MoE block per microbatch."""

    seen: Counter[Launch]
    uploads: Counter[Launch]

    def row(self, what: str, sizes: str, router: str) -> dict[str, Any]:
        """Figures: all launches, those of each group, and uploads."""
        counted: Counter[str] = Counter()
        for launch, number in self.seen.items():
            counted[group_of(launch)] += number
        whole = {"launches": sum(counted.values()), "uploads": sum(self.uploads.values())}
        return {"what": what, "sizes": sizes, "router": router} | whole | {"groups": dict(+counted)}


def group_of(launch: Launch) -> str:
    """The group of a launch."""
    folder = launch.file.partition("/")[0]
    return GROUPS.get(launch.file) or FOLDERS.get(folder, "others")


def of_block(lines: str, router: RouterConfig) -> OfBlock:
    """What a MoE block launches per microbatch."""
    counted = {pair: step(lines, router, *pair) for pair in ((1, 2), (1, 4), (2, 2), (2, 4))}

    def less(what: str) -> Counter[Launch]:
        total: Counter[Launch] = Counter()
        for (blocks, microbatches), launches in counted.items():
            sign = 1 if (blocks == 2) == (microbatches == 4) else -1
            for launch, number in getattr(launches, what).items():
                total[launch] += sign * number
        return Counter({launch: number / 2 for launch, number in total.items() if number})

    return OfBlock(less("seen"), less("uploads"))


def of_layer(lines: str, router: RouterConfig) -> tuple[int, int]:
    """What a MoE layer alone, without a shared expert, launches forward and backward. Gradients are there."""
    torch.manual_seed(0)
    layer = MoELayer(Router(16, router), Experts(8, 16, 8))
    capacity, bound = ExpertCapacity(1.25) if "capacity" in lines else None, 4.0 if "bounded" in lines else None
    layer.attach(ExpertGroup.solo(), "flat", capacity, bound=bound)
    x = torch.randn(32, 16, requires_grad=True)
    layer(x).sum().backward()
    with Launches() as forward:
        output = layer(x)
    gradient = torch.ones_like(output)
    with Launches() as backward:
        output.backward(gradient)
    return sum(forward.seen.values()), sum(backward.seen.values())


def counted(sizes: str, name: str) -> tuple[list[str], list[dict[str, Any]]]:
    """What is above its bar, and a row for the layer and for the block without and with `FUSED`."""
    router, wrong, rows = ROUTERS[name], [], []
    forward, backward = of_layer(SIZES[sizes], router)
    rows.append({"what": "layer", "sizes": sizes, "router": name, "launches": forward + backward, "F": forward})
    if forward + backward > LAYER[name]:
        wrong.append(f"layer, {sizes}, {name}: {forward + backward} launches, {LAYER[name]} at most")
    for fused in ("", FUSED):
        block = of_block(SIZES[sizes] + fused, router)
        rows.append(block.row("block fused" if fused else "block", sizes, name))
        if fused and rows[-1]["launches"] > BLOCK[name]:
            wrong.append(f"block, {sizes}, {name}: {rows[-1]['launches']} launches, {BLOCK[name]} at most")
        if block.uploads:
            wrong.append(f"block, {sizes}, {name}: uploads {dict(block.uploads)}")
    return wrong, rows


def launches() -> tuple[int, list[str], list[dict[str, Any]]]:
    """The number of cases, what is above a bar, and rows of figures; the last one a bounded step with its repeat."""
    cases = [counted(*case) for case in product(SIZES, ROUTERS)]
    repeated = of_block(REPEATED, ROUTERS["softmax"]).row("block, run again", "bounded", "softmax")
    rows = [row for _, rows in cases for row in rows]
    return len(rows) + 1, [text for wrong, _ in cases for text in wrong], [*rows, repeated]
