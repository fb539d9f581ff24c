"""One MoE layer over an expert group, forward and backward, step by step: what the tests of exchanges run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedc.ir.plan import Topology
from schedc.step.costs.exchange import Routing, bounded_rows
from schedc_runtime.moe.counts import DROPPED, Counts, Method, Shape, ascending, counted_rows
from schedc_runtime.moe.exchange import CountsExchange, RowExchange
from schedc_runtime.moe.routes import Route, arrive, collect, depart, land, pack, plan_route, relay, relay_back
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transport.base import TransportError
from schedc_runtime.transport.collectives import TorchCommunicator

METHODS: tuple[Method, ...] = ("flat", "hierarchical", "allgather")


def mixed_rows(rows: Tensor, matrix: Tensor) -> Tensor:
    """[R, H] rows times a matrix [H, H], bent: what an expert computes."""
    return torch.tanh(rows @ matrix)


@dataclass(frozen=True)
class Case:
    """Sizes of a layer.

    tokens: N of each rank. routing: ``random``, or ``one``: the same experts for all. expert: the function of an
    expert's rows and matrix.
    """

    nodes: int
    per_node: int
    tokens: tuple[int, ...]
    experts: int = 16
    top: int = 4
    width: int = 8
    routing: str = "random"
    capacity: int | None = None
    bound: float | None = None
    dtype: torch.dtype = torch.float64
    seed: int = 0
    expert: Callable[[Tensor, Tensor], Tensor] = mixed_rows

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Data:
    """Inputs and gradients [N, H], gate weights and experts [N, k] of each rank; matrices [E, H, H] of all experts."""

    x: list[Tensor]
    weights: list[Tensor]
    index: list[Tensor]
    gradients: list[Tensor]
    matrices: Tensor


@dataclass(frozen=True)
class Result:
    """One rank's output, gradients of x, gate weights and local experts, its route, and bytes that left its node."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    route: Route
    bytes: int


def data_of(case: Case) -> Data:
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=case.dtype)

    index = [torch.rand(n, case.experts, generator=generator).argsort(-1)[:, : case.top] for n in case.tokens]
    if case.routing == "one":
        index = [torch.arange(case.top).expand(n, case.top) for n in case.tokens]
    if case.capacity is not None:
        index = [within(each, case.experts, case.capacity) for each in index]
    return Data(
        x=[random(n, case.width) for n in case.tokens],
        weights=[random(n, case.top).abs() for n in case.tokens],
        index=index,
        gradients=[random(n, case.width) for n in case.tokens],
        matrices=random(case.experts, case.width, case.width) / case.width**0.5,
    )


def within(index: Tensor, experts: int, capacity: int) -> Tensor:
    """The choices with all dropped but the first ``capacity`` of every expert."""
    flat = index.reshape(-1)
    before = torch.nn.functional.one_hot(flat, experts).cumsum(0).gather(1, flat[:, None])[:, 0]
    return torch.where(before <= capacity, flat, DROPPED).view(index.shape)


def shape_of(case: Case, rank: int, method: Method) -> Shape:
    """The sizes of the case's layer on a rank."""
    tokens, topology = max(case.tokens), Topology(case.nodes, case.per_node)
    bounds = case.bound and bounded_rows(tokens, Routing(case.experts, case.top), topology, case.bound)
    return Shape(case.experts, case.nodes, case.per_node, rank, method, case.capacity, tokens, bounds or None)


def steps(case: Case, data: Data, group: ExpertGroup, method: Method) -> Iterator[Result | None]:
    """One rank's layer, forward and backward; yields None where it waits for other ranks, the result at the end.

    Every part between two exchanges is cut off from the next and has its own backward, as in a pipeline's stage.
    """
    rank = group.rank
    shape = shape_of(case, rank, method)
    choices = ascending(data.index[rank], case.experts)
    routing = CountsExchange()
    routing.group = group
    pending = routing.start(None, counted_rows(choices, data.index[rank], shape, data.weights[rank]))
    yield None
    (everyone,) = routing.finish(pending)
    route = plan_route(choices, Counts(everyone, shape))
    matrices = data.matrices.chunk(case.ranks)[rank].clone().requires_grad_()
    tape: list[tuple[Any, list[Tensor], tuple[Tensor, ...]]] = []
    values = [data.x[rank], data.weights[rank]]
    for step in layer(case, method, matrices, group):
        values = [differentiable(value) for value in values]
        if isinstance(step, RowExchange):
            pending = step.start(route, *[value.detach() for value in values])
            yield None
            outputs = step.finish(pending)
        else:
            result = step(route, *values)
            outputs = result if isinstance(result, tuple) else (result,)
        tape.append((step, values, outputs))
        values = list(outputs)
    output = values[0].detach()
    gradients: tuple[Tensor | None, ...] = (data.gradients[rank],)
    for step, inputs, outputs in reversed(tape):
        if isinstance(step, RowExchange):
            pending = step.start_backward(route, *gradients)
            yield None
            gradients = step.finish_backward(pending)
        else:
            pairs = [(output, grad) for output, grad in zip(outputs, gradients, strict=True) if output.requires_grad]
            torch.autograd.backward(*zip(*pairs, strict=True))
            gradients = tuple(value.grad for value in inputs)
    tensors = output, present(gradients[0]), present(gradients[1]), present(matrices.grad)
    yield Result(tensors, route, group.bytes_leaving_node())


def whole(case: Case, data: Data, group: ExpertGroup, method: Method) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A rank's layer as one graph of autograd with blocking exchanges: output, and gradients as in `Result`."""
    shape, index = shape_of(case, group.rank, method), data.index[group.rank]
    choices = ascending(index, case.experts)
    routing = CountsExchange()
    routing.group = group
    (everyone,) = routing(None, counted_rows(choices, index, shape, data.weights[group.rank]))
    route = plan_route(choices, Counts(everyone, shape))
    x, weights, matrices = (
        each.clone().requires_grad_()
        for each in (data.x[group.rank], data.weights[group.rank], data.matrices.chunk(case.ranks)[group.rank])
    )
    values: tuple[Tensor, ...] = (x, weights)
    for step in layer(case, method, matrices, group):
        result = step(route, *values)
        values = result if isinstance(result, tuple) else (result,)
    values[0].backward(data.gradients[group.rank])
    return values[0].detach(), present(x.grad), present(weights.grad), present(matrices.grad)


def layer(case: Case, method: Method, matrices: Tensor, group: ExpertGroup) -> list[Callable[..., Any]]:
    """What runs, in order: parts, which are functions of the route and values, and exchanges."""

    def experts(route: Route, rows: Tensor, weights: Tensor, *ids: Tensor) -> Tensor:
        for numbers in ids:
            land(route, numbers)
        tokens, gate = arrive(route, rows, weights)
        counts = list(route.sizes.counts)
        if case.bound is not None:
            ends = route.counts.mine.sum(0).cumsum(0).clamp(max=len(tokens))
            counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        filled = sum(counts)
        parts = zip(tokens[:filled].split(counts), matrices, strict=True)
        outputs = torch.cat([case.expert(part, matrix) for part, matrix in parts]) * gate[:filled, None]
        rubbish = torch.full_like(tokens[filled:], torch.nan)  # as a product leaves rows behind the last expert's
        return depart(route, torch.cat((outputs, rubbish)))

    middle: list[Callable[..., Any]] = [experts]
    hops = ["flat"] if method == "flat" else ["node", "rail"]
    for number, hop in enumerate(hops):
        there, back = RowExchange("dispatch", hop), RowExchange("combine", hop, reverse=True)  # type: ignore[arg-type]
        there.group = back.group = group
        last = number == len(hops) - 1
        middle = [pack if last else relay, there, *middle, back, collect if last else relay_back]
    return middle


def run_in_process(case: Case, data: Data, groups: Sequence[ExpertGroup], method: Method) -> list[Result]:
    """All ranks in one process, each as far as it gets in turn."""
    running = [steps(case, data, group, method) for group in groups]
    while True:
        results = [next(each) for each in running]
        if results[0] is not None:
            return [result for result in results if result is not None]


def plain(case: Case, data: Data) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """The same layer by plain autograd, all experts in one place: outputs, gradients of x, weights and matrices."""
    matrices = data.matrices.clone().requires_grad_()
    outputs, xs, weights = [], [], []
    for x, weight, index, gradient in zip(data.x, data.weights, data.index, data.gradients, strict=True):
        leaf, gate = x.clone().requires_grad_(), weight.clone().requires_grad_()
        kept = (index >= 0).to(case.dtype) * gate
        each = torch.tanh(torch.einsum("nh,nkhg->nkg", leaf, matrices[index.clamp(min=0)]))
        output = (each * kept[..., None]).sum(1)
        output.backward(gradient)
        outputs.append(output.detach())
        xs.append(present(leaf.grad))
        weights.append(present(gate.grad))
    return outputs, xs, weights, present(matrices.grad)


def present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def differentiable(value: Tensor) -> Tensor:
    """A leaf of the same values, which takes a gradient if its type can."""
    return value.detach().requires_grad_(value.is_floating_point())


def alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors hold the same values, bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def over_gloo(rank: int, world_size: int, per_node: int, tokens: list[int], seed: int) -> dict[str, Any]:
    """All methods over gloo, in steps and as one graph, against all ranks in this process.

    What differs from that, and the bytes that left the node in steps, here and there.
    """
    from schedc_runtime.ranks.mesh import in_process_expert_groups

    case = Case(world_size // per_node, per_node, tuple(tokens), dtype=torch.float32, seed=seed)
    data = data_of(case)
    assert dist.group.WORLD is not None
    wrong, counted = [], {}
    for method in METHODS:
        group = ExpertGroup.of([range(dist.get_world_size())], per_node, timeout=20)
        *_, result = steps(case, data, group, method)
        expected = run_in_process(case, data, in_process_expert_groups(world_size, per_node), method)[rank]
        assert result is not None
        wrong += [method] * (not alike(result.tensors, expected.tensors))
        wrong += [f"{method} whole"] * (not alike(whole(case, data, group, method), expected.tensors))
        counted[method] = [result.bytes, expected.bytes]
    return {"wrong": wrong, "bytes": counted}


def collectives_over_gloo(rank: int, world_size: int) -> list[str]:
    """Odd tensors through every collective of a group; what came out wrong."""
    assert dist.group.WORLD is not None
    communicator = TorchCommunicator(dist.group.WORLD, timeout=20, name="odd")
    wrong = []
    turned = torch.arange(2.0 * world_size).view(2, world_size).t() + 100 * rank
    flags = torch.tensor([rank % 2 == 0] * rank, dtype=torch.bool)
    only_last = [rank if member == world_size - 1 else 0 for member in range(world_size)]
    received = list(range(world_size)) if rank == world_size - 1 else [0] * world_size
    uneven = communicator.all_to_all((flags, torch.full((rank, 3), rank)), only_last, received)
    ones = [1] * world_size
    handle = communicator.all_to_all((turned, turned[:, 0] > 99), ones, ones, "odd")
    empty = communicator.all_to_all((torch.empty(0, 3),), [0] * world_size, [0] * world_size)
    short = communicator.all_gather(torch.tensor([[rank, -1]], dtype=torch.int16))
    total = communicator.sum(torch.full((5,), 0.1, dtype=torch.float32) * (rank + 1))
    rows, marks = communicator.wait(handle)
    wrong += ["rows"] * (
        rows.tolist() != [[rank + 100.0 * m, world_size + rank + 100.0 * m] for m in range(world_size)]
    )
    wrong += ["marks"] * (marks.tolist() != [m > 0 for m in range(world_size)])
    marks, sources = communicator.wait(uneven)
    wrong += ["flags"] * (marks.tolist() != [m % 2 == 0 for m in range(world_size) for _ in range(received[m])])
    wrong += ["sources"] * (sources.tolist() != [[m] * 3 for m in range(world_size) for _ in range(received[m])])
    wrong += ["empty"] * (communicator.wait(empty)[0].shape != (0, 3))
    wrong += ["gather"] * (communicator.wait(short).tolist() != [[[m, -1]] for m in range(world_size)])
    expected = torch.zeros(5)
    for member in range(world_size):
        expected = expected + torch.full((5,), 0.1, dtype=torch.float32) * (member + 1)
    wrong += ["sum"] * (not torch.equal(communicator.wait(total), expected))
    wrong += ["issued"] * (communicator.issued != 5)
    try:
        communicator.wait(handle)
        wrong.append("twice")
    except RuntimeError as error:
        wrong += ["message"] * ("collective 1 (all_to_all `odd`)" not in str(error))
    return wrong


def lost_over_gloo(rank: int, world_size: int) -> str:
    """What a rank reads when the others never start a collective."""
    group = dist.new_group(list(range(world_size)), backend="gloo")
    communicator = TorchCommunicator(group, timeout=0.5, name="rail 1")
    if rank:
        return ""
    try:
        communicator.wait(communicator.all_gather(torch.zeros(1), "routing"))
    except TransportError as error:
        return str(error)
    return "no error"
