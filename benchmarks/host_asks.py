"""Counts what a MoE layer asks the host for: values of tensors, and copies of indexes from the host.

    python benchmarks/host_asks.py [--json]

Instrument: a dispatch mode and wrapped tensor methods count every operation that needs a value on the host. They watch
the forward and the backward of one layer on one rank, by all methods. Operations are those whose result has a size that
values decide, and conversions to Python. Uploads are tensors of whole numbers made from host data. A second instrument
runs the whole layer on the meta device, where asking for a value is an error. Hot experts need other ranks: two of them
train in one process, with 2 microbatches and with 4, and what the others ask for is counted.

Printed: `asks_per_layer` by mode, the most of any method. `exact` has `F` and `B`, its forward and backward. `padded`
has a capacity, `bounded` buffers of 1.5 times the mean rows. `adaptive` is exact with adaptive recomputation.
`host_lane` is exact, with the copy of sizes as a step of its own. `hot` is exact, with two experts lent by step.
`copies` has copies by step beside bounded sizes; the choice of copies between steps asks nothing.
`uploads_per_layer`, and `runs_on_meta` for `padded` and `bounded`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import schedc
from schedc.ir.plan import Balance, By, Drop, Hot, Level, Recompute
from schedc.plan import Method as PlanMethod
from schedc.plan import Plan
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.device.operations import arguments_of
from schedc_runtime.device.operations import asks as asks_host
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.capacity import ExpertCapacity
from schedc_runtime.moe.counts import METHODS, Method
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.recompute.levels import Recomputation

MODES = ("exact", "padded", "bounded", "adaptive", "host_lane")
LAYERS = 2
METHODS_OF_TENSORS = ("tolist", "numpy", "cpu", "item", "__int__", "__bool__", "__float__", "__array__", "__index__")


class Asks(TorchDispatchMode):
    """Counts operations that ask for values, and whole numbers that come from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.asks: Counter[str] = Counter()
        self.uploads = 0
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if not self.inside:
            self.asks[name] += asks_host(func, arguments_of(func, args, kwargs))
            # A number alone becomes an argument of a kernel, and is not copied.
            self.uploads += name == "lift_fresh" and not args[0].is_floating_point() and args[0].dim() > 0
        return func(*args, **kwargs)


@contextmanager
def counting() -> Iterator[Asks]:
    """Counts what runs inside."""
    mode = Asks()
    before = {name: getattr(Tensor, name) for name in METHODS_OF_TENSORS}
    from_numpy = torch.from_numpy

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if mode.inside:
                return method(*args, **options)
            mode.asks[name] += 1
            mode.inside = True  # a method that asks through another method asks once
            try:
                return method(*args, **options)
            finally:
                mode.inside = False

        return call

    def uploaded(*args: Any) -> Any:
        mode.uploads += 1
        return from_numpy(*args)

    for name, method in before.items():
        setattr(Tensor, name, counted(name, method))
    torch.from_numpy = uploaded
    try:
        with mode:
            yield mode
    finally:
        torch.from_numpy = from_numpy
        for name, method in before.items():
            setattr(Tensor, name, method)


def layer_of(method: Method, mode: str, device: str = "cpu") -> MoELayer:
    """A layer of 8 experts, top 2, on a group of one rank."""
    torch.manual_seed(0)
    layer = MoELayer(Router(16, RouterConfig(8, 2)), Experts(8, 16, 12)).to(device)
    capacity = ExpertCapacity(1.25, Drop.PROBS) if mode == "padded" else None
    bound = 1.5 if mode == "bounded" else None
    layer.attach(ExpertGroup.solo(), method, capacity, bound=bound, host_lane=mode == "host_lane")
    return layer


def forward(layer: MoELayer, device: str = "cpu", recomputation: Recomputation | None = None) -> Tensor:
    """The sum [] of the results of 32 tokens."""
    x = torch.randn(32, 16, device=device, requires_grad=True)
    if recomputation is None:
        return layer(x).sum()
    recorder = recomputation.recorder()
    recorder.layer = 0
    with recorder.forwarding():
        return layer(x).sum()


def run(layer: MoELayer, device: str = "cpu", recomputation: Recomputation | None = None) -> None:
    """One forward and backward of 32 tokens."""
    forward(layer, device, recomputation).backward()


def by_pass(method: Method) -> tuple[int, int]:
    """Asks of the forward and of the backward of one layer and microbatch, with exact sizes."""
    layer = layer_of(method, "exact")
    run(layer)
    with counting() as first:
        result = forward(layer)
    with counting() as second:
        result.backward()
    return sum(first.asks.values()), sum(second.asks.values())


def asks(method: Method, mode: str) -> tuple[int, int]:
    """(asks, uploads) of one layer and microbatch."""
    layer = layer_of(method, mode)
    plan = Recompute(Level.LIGHT, adaptive=1.5, by=By.RANK)
    recomputation = Recomputation(plan, None, False) if mode == "adaptive" else None
    run(layer, recomputation=recomputation)
    with counting() as counted:
        run(layer, recomputation=recomputation)
    return sum(counted.asks.values()), counted.uploads


def of_step(plan: Plan, held: Sequence[Any], microbatches: int) -> tuple[int, int]:
    """(asks, uploads) of a step of two ranks whose layers have copies ``held``, two on a rank or of an owner."""
    torch.manual_seed(0)
    near = plan.balance is not None and str(plan.method) != "flat"  # copies stay in a node
    config = MoEConfig(vocab=32, width=16, dense_blocks=0, moe_blocks=LAYERS, routing=RouterConfig(8, 2))
    pipe = Pipeline(
        MoETransformer(config), schedc.compile("1f1b", P=1, M=microbatches), in_process=True, plan=plan,
        loss_fn=lambda logits, tokens: functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
        mesh=Mesh(1, 2, per_node=2 if near else 1),
    )  # fmt: skip
    tokens = torch.randint(0, 32, (2 * microbatches, 8))
    pipe.step(tokens, tokens)
    pipe.load_balance_state(dict.fromkeys(pipe.balance_state(), held))
    with counting() as counted:
        pipe.step(tokens, tokens)
    layers = [layer for place in pipe.places for stage in pipe.held(place) for _, layer in moe_layers(stage.module)]
    assert all(layer.statistics.hot_experts == 2 for layer in layers)
    pipe.close()
    return sum(counted.asks.values()), counted.uploads


def with_copies(plan: Plan, held: Sequence[Any]) -> tuple[int, int]:
    """(asks, uploads) of one layer and microbatch with copies by step: as a microbatch adds to a step."""
    (few, up), (many, more) = of_step(plan, held, 2), of_step(plan, held, 4)
    each = 2 * 2 * LAYERS  # two microbatches on two ranks
    return ceil((many - few) / each), ceil((more - up) / each)


def on_meta(method: Method, mode: str) -> bool:
    """Whether the layer runs on the meta device, forward and backward."""
    try:
        run(layer_of(method, mode, "meta"), "meta")
    except (RuntimeError, NotImplementedError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    figures = {mode: [asks(method, mode) for method in METHODS] for mode in MODES}
    figures["hot"] = [with_copies(Plan(method=PlanMethod(method), hot=Hot(2)), [0, 5]) for method in METHODS]
    figures["copies"] = [
        with_copies(Plan(method=PlanMethod(method), balance=Balance(by="step"), bound=4.0), [[], [0, 1]])
        for method in METHODS
    ]
    most: dict[str, Any] = {mode: max(ask for ask, _ in each) for mode, each in figures.items()}
    passes = [by_pass(method) for method in METHODS]
    most["exact"] = {name: max(each) for name, each in zip("FB", zip(*passes, strict=True), strict=True)}
    results = {
        "asks_per_layer": most,
        "uploads_per_layer": max(upload for each in figures.values() for _, upload in each),
        "runs_on_meta": {mode: all(on_meta(method, mode) for method in METHODS) for mode in ("padded", "bounded")},
    }
    print(json.dumps(results) if args.json else json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
