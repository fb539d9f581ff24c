"""Stages in segments: the graph that cutting gives, and the same bits for every legal order of the micro-steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc.cell.serial import serial
from schedc.cell.standard_blocks import stage_shape
from schedc_runtime.errors import RuntimeFault, StageError
from schedc_runtime.moe.exchange import CountsExchange, RowExchange
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import Boundary, TensorSpec
from schedc_runtime.random_numbers.numbering import Numbering, by_name
from schedc_runtime.ranks.expert_group import ExpertGroup, in_process_expert_groups
from schedc_runtime.segments import DeclaredPart, stage_graph
from schedc_runtime.stage.stage import Stage
from support.segmented_cases import shuffled, small_moe, unequal
from support.sweeps import halved, swept, thinned

# What cutting gives.


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("method", thinned(["flat", "hierarchical", "allgather"], 3))
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("dense", "moe", "sizes"), [(0, 1, True), (1, 2, False), (2, 0, True)])
def test_shapes_are_those_of_standard_blocks(method: Any, shared: bool, dense: int, moe: int, sizes: bool) -> None:
    model = small_moe(moe, dense, shared=int(shared))
    shard_experts(model, in_process_expert_groups(4, 2)[0], method, host_lane=sizes)
    (stage,) = partition(nn.Sequential(*model.blocks), 1, blocks="").modules
    names = [str(i) for i in range(dense + moe)]
    blocks = ["dense"] * dense + ["moe"] * moe
    assert stage_graph(stage, 1, names).shape == stage_shape(blocks, method, shared, sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["flat", "hierarchical"])
def test_an_auxiliary_loss_of_several_replicas_is_one_more_exchange(method: Any) -> None:
    routing = RouterConfig(experts=8, top=2, balance=0.1)
    for group, balance in ((in_process_expert_groups(4, 2)[0], True), (ExpertGroup.solo(), False)):
        model = small_moe(2, 1, routing=routing)
        shard_experts(model, group, method)
        (stage,) = partition(nn.Sequential(*model.blocks), 1, blocks="").modules
        blocks = ["dense", "moe", "moe"]
        expected = stage_shape(blocks, method, nodes=group.nodes, balance=balance)
        assert stage_graph(stage, 1, ["0", "1", "2"]).shape == expected


class Toy(nn.Module):
    """A block with a dispatch and a combine, whose rows stay here."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(width), nn.Linear(width, width)
        self.experts, self.shared = nn.Linear(width, width), nn.Linear(width, width)
        self.routing, self.route = CountsExchange(), Split()
        self.dispatch = RowExchange("dispatch", "flat")
        self.combine = RowExchange("combine", "flat", reverse=True)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x + self.first(self.norm(x))
        return hidden, hidden.detach().argsort(-1)[:, :2]

    def after(self, hidden: Tensor, shared: Tensor, rows: Tensor) -> Tensor:
        return hidden + rows + shared

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.first(self.norm(x))
        (everyone,) = self.routing(None, hidden.detach().argsort(-1)[:, :2])
        route = self.route(everyone)
        (rows,) = self.dispatch(route, hidden)
        (rows,) = self.combine(route, self.experts(rows))
        return hidden + rows + self.shared(hidden)


class Split(nn.Module):
    """A route that keeps every row where it is."""

    def forward(self, everyone: Tensor) -> Any:
        return self

    def splits(self, hop: str, reverse: bool) -> tuple[list[int], list[int]]:
        return [3], [3]


class ByHand(Toy):
    """The same, but for a forward that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return super().forward(x)

    def segments(self) -> list[DeclaredPart]:
        return [
            DeclaredPart("before", ("x",), ("hidden", "index"), uses=("norm", "first")),
            DeclaredPart("routing", (None, "index"), ("everyone",)),
            DeclaredPart("route", ("everyone",), ("route",)),
            DeclaredPart("shared", ("hidden",), ("shared",)),
            DeclaredPart("dispatch", ("route", "hidden"), ("rows",)),
            DeclaredPart("experts", ("rows",), ("made",)),
            DeclaredPart("combine", ("route", "made"), ("back",)),
            DeclaredPart("after", ("hidden", "shared", "back"), ("output",), uses=()),
        ]


class Loosely(ByHand):
    """Without saying what the methods use: methods may share parts, and their weight gradients wait for each other."""

    def segments(self) -> list[DeclaredPart]:
        return [part._replace(uses=None) for part in super().segments()]


def toy_stage(kind: type[nn.Module], blocks: int = 2) -> Stage:
    torch.manual_seed(0)
    return bound(nn.Sequential(*[kind() for _ in range(blocks)]).double(), "")


def bound(model: nn.Module, blocks: str, loss_fn: Callable[[Any, Any], Tensor] | None = None, slices: int = 1) -> Stage:
    """The model as the first of two stages, or as the last of two where it forms a loss, ready to run."""
    parts = partition(model, 1, blocks=blocks, example=torch.ones(3, 4, dtype=torch.float64))
    index = int(loss_fn is not None)
    stage = Stage(parts.modules[0], index, 2, loss_fn=loss_fn, inputs=1, blocks=parts.blocks[0], slices=slices)
    whole, part = (
        [Boundary((TensorSpec((rows, 4), torch.float64, True),), pytree.tree_structure(tree), (name,))
         for tree, name in (((0,), "x"), (0, "y"))]
        for rows in (3 * slices, 3)
    )  # fmt: skip
    stage.bind(*whole, (part[0], part[1]))
    return stage


def toy_results(stage: Stage, run: Callable[[Stage, Tensor, Tensor], Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    (y,), (x_grad,) = run(stage, x, grad)
    grads = {name: p.grad for name, p in stage.module.named_parameters()}
    return {"y": y, "x": x_grad, **{name: g for name, g in grads.items() if g is not None}}


def at_once(stage: Stage, x: Tensor, grad: Tensor) -> Any:
    return stage.forward(0, (x,)), stage.backward(0, (grad,))


def test_declared_segments_are_the_traced_ones() -> None:
    traced, by_hand = toy_stage(Toy), toy_stage(ByHand)
    assert by_hand.shape.names == traced.shape.names
    assert [n.weights for n in by_hand.shape.nodes] == [n.weights for n in traced.shape.nodes]
    expected = toy_results(traced, at_once)
    assert unequal(toy_results(by_hand, at_once), expected) == []
    assert len(expected) == 2 + 2 * 8  # every parameter has a gradient
    # And plain autograd of the undivided model gives the same values.
    torch.manual_seed(0)
    model = nn.Sequential(Toy(), Toy()).double()
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    model(x.requires_grad_()).backward(grad)
    torch.testing.assert_close(expected["x"], x.grad, rtol=1e-12, atol=1e-14)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(expected[name], parameter.grad, rtol=1e-12, atol=1e-14)


class Whole(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.dispatch(self.route(x), x))


class Untraceable(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Misnamed(ByHand):
    def segments(self) -> list[DeclaredPart]:
        return [
            DeclaredPart("before", ("x",), ("hidden", "index")),
            DeclaredPart("routing", (None, "indices"), ("everyone",)),
        ]


class Unknown(ByHand):
    def segments(self) -> list[DeclaredPart]:
        return [DeclaredPart("ahead", ("x",), ("hidden",))]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Whole, "linear.*argument 'input'.*must be Tensor, not tuple"),
        (Untraceable, r"used as inputs to control flow\n  --> .*test_segmented.py:\d+: return super"),
        (Misnamed, r"part `routing` takes \['indices'\], which no part before it gives"),
        (Unknown, "no submodule and no method `ahead`"),
    ],
)
def test_a_block_that_cannot_be_cut_is_refused(block: type[nn.Module], message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        toy_stage(block, 1)


# Micro-steps.


@pytest.mark.parametrize("slices", [1, 2])
def test_a_loss_that_multiplies_leaves_its_weight_gradients_for_w(slices: int) -> None:
    torch.manual_seed(0)
    model, head = nn.Sequential(Toy()).double(), nn.Linear(4, 4).double()
    stage = bound(model, "", lambda y, target: (head(y) - target).square().mean(), slices)
    x, target = torch.randn(2, 3 * slices, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (head(torch.cat([model(part) for part in x.split(3)])) - target).square().mean().backward()
    expected = [parameter.grad for parameter in head.parameters()]
    head.zero_grad()
    stage.module.zero_grad()
    stage.forward(0, (x,), target)
    stage.backward(0, defer=True)
    assert [parameter.grad for parameter in head.parameters()] == [None, None]
    assert stage.pending == (0,)
    stage.weight(0)
    stage.check_empty()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(head.parameters(), expected, strict=True))  # type: ignore[arg-type]


class Writer(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if False else self._write(x)

    def _write(self, x: Tensor) -> Tensor:
        hidden = x + self.first(x)
        (rows,) = self.dispatch(self.route(hidden), hidden)
        return rows.add_(1.0)


def test_misuse_is_refused() -> None:
    stage = toy_stage(Toy, 1)
    names = {name: at for at, name in enumerate(stage.shape.names)}
    x = torch.ones(3, 4, dtype=torch.float64)
    with pytest.raises(StageError, match="microbatch 0 has not been forwarded"):
        stage.run(0, 0)
    stage.begin(0, (x,))
    with pytest.raises(StageError, match="forwarded again"):
        stage.begin(0, (x,))
    with pytest.raises(StageError, match=r"0.permute takes a value of 0.routing.node before it is there"):
        stage.run(0, names["0.permute"])
    with pytest.raises(StageError, match=r"0.routing.node is an exchange"):
        stage.run(0, names["0.routing.node"])
    with pytest.raises(StageError, match=r"0.attention is no exchange"):
        stage.start(0, 0)
    with pytest.raises(StageError, match=r"the forward of 0.dispatch.node was not started"):
        stage.wait(0, names["0.dispatch.node"])
    with pytest.raises(StageError, match=r"0.post has no forward to differentiate"):
        stage.run_backward(0, names["0.post"])
    with pytest.raises(StageError, match=r"still holds microbatches \[0\]"):
        stage.check_empty()
    stage.reset()
    stage.forward(0, (x,))
    with pytest.raises(StageError, match="2 output gradients for 1 outputs"):
        stage.begin_backward(0, (x, x))
    stage.backward(0, (x,), defer=True)
    with pytest.raises(StageError, match=r"\[0\] \(no weight gradients yet\)"):
        stage.check_empty()
    stage.weight(0)
    stage.check_empty()
    with pytest.raises(RuntimeFault, match=r"(?s)`0` of Sequential fails on .*modified inplace"):
        toy_stage(Writer, 1)


class Dropping(Toy):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.shared = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5))  # type: ignore[assignment]
        self.experts = nn.Sequential(nn.Dropout(0.5), nn.Linear(width, width))  # type: ignore[assignment]


def test_slices_of_one_microbatch_draw_numbers_of_their_own() -> None:
    torch.manual_seed(0)
    stage = bound(nn.Sequential(Dropping()).double(), "", slices=2)
    stage.numbering = Numbering(stage.module, 0, torch.device("cpu"), {})
    x = torch.ones(3, 4, dtype=torch.float64)
    with by_name():
        (y,) = stage.forward(0, (torch.cat([x, x]),))
    assert not torch.equal(y[:3], y[3:])


class Scaled(nn.Linear):
    """A linear layer whose output is multiplied by a matrix, elementwise: I computes the gradient of the matrix."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width, width)
        self.scale = nn.Parameter(torch.randn(1, width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Shared(nn.Module):
    """Blocks that all use one scaled linear layer and one norm, in different segments."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Toy(), Toy()])
        first, second = self.blocks
        first.shared = second.shared = Scaled()
        second.experts = nn.Sequential(first.shared, nn.Tanh())  # without the Tanh its gradients are those of `shared`
        second.norm = first.norm

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def in_order(seed: int) -> Callable[[Stage, Tensor, Tensor], Any]:
    """Two microbatches through a stage, by random cells: F0, F1 with B0, B1."""

    def run(stage: Stage, x: Tensor, grad: Tensor) -> Any:
        cells = shuffled(seed) if seed else serial
        results: dict[Any, Any] = {}
        for kind, forward, backward in [("F", 0, None), ("FB", 1, 0), ("I", None, 1), ("W", None, 1)]:
            shapes = [None if m is None else stage.shape for m in (forward, backward)]
            if forward is not None:
                stage.begin(forward, (x * (forward + 1),))
            if backward is not None and kind != "W":
                stage.begin_backward(backward, (grad + backward,))
            for action, half, node in cells(kind, *shapes).steps:
                suffix = {"forward": "", "backward": "_backward", "weight": "_weight"}[half]
                getattr(stage, f"{action}{suffix}")(forward if half == "forward" else backward, node)
            if forward is not None:
                results["y", forward] = stage.outputs(forward)[0]
            if backward is not None and kind != "W":
                results["x", backward] = stage.input_gradients(backward)[0]
                stage.end_backward(backward)
        stage.check_empty()
        return (torch.stack([results["y", m] for m in (0, 1)]),), (torch.stack([results["x", m] for m in (0, 1)]),)

    return run


@pytest.mark.slow
def test_segments_that_share_a_parameter_add_its_gradients_in_one_order() -> None:
    """Whatever the order of the cell: of products, of vectors, and of a matrix whose gradient I computes."""
    results = [toy_results(_toys("shared"), in_order(seed)) for seed in range(9)]
    assert [unequal(each, results[0]) for each in results[1:]] == [[]] * 8
    model = _shared()
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    for microbatch in (0, 1):
        model(x * (microbatch + 1)).backward(grad + microbatch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results[0][name], parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(20, 5))
@given(seed=st.integers(1, 2**32))
@pytest.mark.parametrize("kind", halved(["apart", "shared", "loosely", "dropping"]))
def test_any_order_of_micro_steps_gives_the_same_bits(kind: str, seed: int) -> None:
    if kind not in _EXPECTED:
        _EXPECTED[kind] = toy_results(_toys(kind), in_order(0))
    results = toy_results(_toys(kind), in_order(seed))
    assert unequal(results, _EXPECTED[kind]) == []
    assert kind == "shared" or len(results) == 2 + 2 * 8  # every parameter has a gradient


_EXPECTED: dict[str, dict[str, Tensor]] = {}


def _toys(kind: str) -> Stage:
    if kind != "shared":
        return toy_stage({"apart": Toy, "loosely": Loosely, "dropping": Dropping}[kind])
    return bound(_shared(), "blocks")


def _shared() -> nn.Module:
    torch.manual_seed(0)
    return Shared().double()
