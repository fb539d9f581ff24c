"""Stages in segments: the graph that cutting gives, and the same bits for every legal order of the micro-steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_cases import differences, next_token_loss, oracle, plain, small_gpt, tokens
from segmented_cases import COSTS, listed, shuffled, small_moe, together, unequal
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import schedc
from schedc.cell.blocks import stage_shape
from schedc.cell.costs import Times
from schedc.cell.predict import predict
from schedc.cell.program import Action, Half
from schedc.cell.table import CellTable
from schedc.cost.costs import Costs, dump_costs, parse_costs
from schedc.ir.ops import OpKind
from schedc.ir.program import InstructionKind
from schedc.plan import ExpertPlan
from schedc.source import Source
from schedc_runtime import Pipeline
from schedc_runtime.boundary import Boundary, TensorSpec
from schedc_runtime.calibrate import measured_cell_costs
from schedc_runtime.cells import Part as Micro
from schedc_runtime.cells import part_of, serial
from schedc_runtime.emulate import Device
from schedc_runtime.errors import PartitionError, RuntimeFault, StageError
from schedc_runtime.executor import InstructionError, Interval
from schedc_runtime.mesh import Mesh
from schedc_runtime.moe.exchange import RoutingExchange, RowExchange
from schedc_runtime.moe.group import ExpertGroup, in_process_expert_groups
from schedc_runtime.moe.huggingface import swap_experts
from schedc_runtime.moe.router import Routing
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.partition import partition
from schedc_runtime.planned import cells_for
from schedc_runtime.segments import Part, SegmentedStage, stage_graph
from schedc_runtime.testing import pool
from schedc_runtime.trace import chrome_trace, compare, measured_costs

# What cutting gives.


@pytest.mark.parametrize("method", ["flat", "hierarchical", "allgather"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("dense", "moe"), [(0, 1), (1, 2), (2, 0)])
def test_shapes_are_those_of_standard_blocks(method: Any, shared: bool, dense: int, moe: int) -> None:
    model = small_moe(moe, dense, shared=int(shared))
    shard_experts(model, in_process_expert_groups(4, 2)[0], method)
    (stage,) = partition(nn.Sequential(*model.blocks), 1, blocks="").modules
    names = [str(i) for i in range(dense + moe)]
    assert stage_graph(stage, 1, names).shape == stage_shape(["dense"] * dense + ["moe"] * moe, method, shared)


@pytest.mark.parametrize("method", ["flat", "hierarchical"])
def test_an_auxiliary_loss_of_several_replicas_is_one_more_exchange(method: Any) -> None:
    routing = Routing(experts=8, k=2, balance=0.1)
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
        self.routing, self.route = RoutingExchange(8), Split()
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

    def splits(self, hop: str, reverse: bool, payload: int) -> tuple[list[int], list[int]]:
        return [3], [3]


class ByHand(Toy):
    """The same, but for a forward that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return super().forward(x)

    def segments(self) -> list[Part]:
        return [
            Part("before", ("x",), ("hidden", "index"), uses=("norm", "first")),
            Part("routing", (None, "index"), ("everyone",)),
            Part("route", ("everyone",), ("route",)),
            Part("shared", ("hidden",), ("shared",)),
            Part("dispatch", ("route", "hidden"), ("rows",)),
            Part("experts", ("rows",), ("made",)),
            Part("combine", ("route", "made"), ("back",)),
            Part("after", ("hidden", "shared", "back"), ("output",), uses=()),
        ]


class Loosely(ByHand):
    """Without saying what the methods use: they may share it, and their weight gradients wait for each other."""

    def segments(self) -> list[Part]:
        return [part._replace(uses=None) for part in super().segments()]


def toy_stage(kind: type[nn.Module], blocks: int = 2) -> SegmentedStage:
    torch.manual_seed(0)
    return bound(nn.Sequential(*[kind() for _ in range(blocks)]).double(), "")


def bound(model: nn.Module, blocks: str) -> SegmentedStage:
    """The model as the first of two stages, ready to run."""
    parts = partition(model, 1, blocks=blocks)
    stage = SegmentedStage(parts.modules[0], 0, 2, inputs=1, blocks=parts.blocks[0])
    spec = TensorSpec((3, 4), torch.float64, True)
    edge = Boundary((spec,), pytree.tree_structure((0,)), ("x",))
    out = Boundary((spec,), pytree.tree_structure(0), ("y",))
    stage.bind(edge, out)
    return stage


def toy_results(stage: SegmentedStage, run: Callable[[SegmentedStage, Tensor, Tensor], Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    (y,), (x_grad,) = run(stage, x, grad)
    found = {name: p.grad for name, p in stage.module.named_parameters()}
    return {"y": y, "x": x_grad, **{name: g for name, g in found.items() if g is not None}}


def at_once(stage: SegmentedStage, x: Tensor, grad: Tensor) -> Any:
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
    def segments(self) -> list[Part]:
        return [Part("before", ("x",), ("hidden", "index")), Part("routing", (None, "indices"), ("everyone",))]


class Unknown(ByHand):
    def segments(self) -> list[Part]:
        return [Part("ahead", ("x",), ("hidden",))]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Whole, "gives is used as a whole by `blocks?_?0_experts|used as a whole"),
        (Untraceable, r"cannot be traced: .*\n  --> .*test_segmented.py:\d+: return super"),
        (Misnamed, r"part `routing` takes \['indices'\], which no part before it gives"),
        (Unknown, "no submodule and no method `ahead`"),
    ],
)
def test_a_block_that_cannot_be_cut_is_refused(block: type[nn.Module], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        toy_stage(block, 1)


# Micro-steps.


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
    with pytest.raises(StageError, match=r"0.post writes into a value of another segment"):
        toy_stage(Writer, 1).forward(0, (x,))


class Dropping(Toy):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.shared = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5))  # type: ignore[assignment]
        self.experts = nn.Sequential(nn.Dropout(0.5), nn.Linear(width, width))  # type: ignore[assignment]


class Shared(nn.Module):
    """Blocks that all use one linear layer and one norm, in different segments."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Toy(), Toy()])
        first, second = self.blocks
        second.experts = second.shared = first.shared
        second.norm = first.norm

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def in_order(seed: int) -> Callable[[SegmentedStage, Tensor, Tensor], Any]:
    """Two microbatches through a stage, by random cells: F0, F1 with B0, B1."""

    def run(stage: SegmentedStage, x: Tensor, grad: Tensor) -> Any:
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


@settings(max_examples=20)
@given(seed=st.integers(1, 2**32))
@pytest.mark.parametrize("kind", ["apart", "shared", "loosely", "dropping"])
def test_any_order_of_micro_steps_gives_the_same_bits(kind: str, seed: int) -> None:
    if kind not in _EXPECTED:
        _EXPECTED[kind] = toy_results(_toys(kind), in_order(0))
    results = toy_results(_toys(kind), in_order(seed))
    assert unequal(results, _EXPECTED[kind]) == []
    assert kind == "shared" or len(results) == 2 + 2 * 8  # every parameter has a gradient


_EXPECTED: dict[str, dict[str, Tensor]] = {}


def _toys(kind: str) -> SegmentedStage:
    if kind != "shared":
        return toy_stage({"apart": Toy, "loosely": Loosely, "dropping": Dropping}[kind])
    torch.manual_seed(0)
    return bound(Shared().double(), "blocks")


# Cells in pipelines.

STEPS: dict[str, dict[str, int]] = {
    "dualpipev": {"P": 2, "M": 4}, "zbv": {"P": 2, "M": 3}, "1f1b": {"P": 3, "M": 3}, "dualpipe": {"P": 2, "M": 4},
}  # fmt: skip


@pytest.mark.parametrize("schedule", STEPS)
@pytest.mark.parametrize("model", ["moe", "dense"])
def test_pipelines_of_cells_equal_the_reference(schedule: str, model: str) -> None:
    """Dense and MoE blocks mixed, and unequal numbers of them in the two halves of a pair."""
    program = schedc.compile(schedule, **STEPS[schedule])
    whole = small_moe(5, 2) if model == "moe" else small_gpt(7)
    dense = {"overlap": True} if model == "dense" else {}
    pipe = Pipeline(whole, program, loss_fn=next_token_loss, in_process=True, cells=listed, **dense)
    batch, targets = tokens(program.microbatches)
    expected = oracle(pipe, batch, targets)
    assert differences(pipe, pipe.step(batch, targets), expected) == []
    torch.testing.assert_close(pipe.evaluate(batch, targets), expected.loss, rtol=1e-12, atol=1e-14)
    pipe.close()


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32), method=st.sampled_from(["flat", "hierarchical", "allgather"]))
def test_any_cells_give_the_same_bits_on_expert_groups(seed: int, method: Any) -> None:
    program = schedc.compile("dualpipev", P=1, M=3)
    mesh = Mesh(1, experts=4, per_node=2)
    if not _SERIAL:
        ranks = together(mesh, small_moe(4), program, serial)
        ranks.step()
        _SERIAL.update(ranks.results())
    ranks = together(mesh, small_moe(4), program, shuffled(seed), method)
    ranks.step()
    results = ranks.results()
    assert {place: unequal(results[place], _SERIAL[place]) for place in results} == {place: [] for place in _SERIAL}


_SERIAL: dict[Any, dict[str, Tensor]] = {}


def test_expert_groups_train_the_undivided_model() -> None:
    program = schedc.compile("dualpipev", P=2, M=4)
    mesh = Mesh(2, experts=2)
    ranks = together(mesh, small_moe(), program, listed)
    ranks.step()
    found = ranks.results()
    total: dict[str, Tensor] = {}
    model = small_moe()
    for replica in range(2):
        batch, targets = tokens(4, seed=replica + 1)
        for name, grad in plain(model, batch, targets, 4)[1].items():
            total[name] = total[name] + grad if name in total else grad
    seen = set()
    for place, grads in found.items():
        for name, grad in grads.items():
            if name.startswith("loss"):
                continue
            seen.add(name)
            if ".experts." in name:  # each rank has half of the experts, whose tokens came from everywhere
                expected = total[name].chunk(2)[place.replica]
            else:
                grad = grad + found[place._replace(replica=1 - place.replica)][name]
                expected = total[name]
            torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-13)
    assert seen == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("method", ["flat", "hierarchical"])
def test_cells_on_processes(method: str) -> None:
    sizes = {"P": 2, "M": 4}
    arguments = {"schedule": "dualpipev", "sizes": sizes, "experts": 2, "method": method}
    assert pool(4).run("segmented_cases:parity", timeout=120, **arguments) == [[]] * 4


def test_messages_leave_before_the_end_of_a_cell_and_are_waited_for_where_a_half_begins() -> None:
    program = schedc.compile("dualpipev", P=2, M=6)
    ranks = together(Mesh(2), small_moe(4), program, listed)
    early = late = 0
    for place, executor in ranks.executors.items():
        code = executor.code
        posts = [row for row in code.rows if program.kind[row] in (InstructionKind.SEND, InstructionKind.RECV)]
        assert posts == sorted(posts)  # in the order that all ranks agree on
        rows = {row for at, row in enumerate(code.rows) for row in range(row, row + code.widths[at])}
        start, end = program.rank_start[place.pipeline : place.pipeline + 2].tolist()
        assert rows == set(range(start, end))
        for at, row in enumerate(code.rows[:-1]):
            if program.kind[row] == InstructionKind.SEND and code.rows[at + 1] < row:
                early += part_of(code.steps[at + 1]) != ""
            if program.kind[row] == InstructionKind.WAIT and code.steps[at][1].slot >= 0:
                assert part_of(code.steps[at + 1]) in ("begin", "begin backward")
                late += code.rows[at - 1] == code.rows[at + 1]
    assert early > 0
    assert late > 0


def test_a_block_alone_computes_while_it_waits() -> None:
    """What `overlap auto` gives F and B outside of pairs: three of four exchanges are filled."""
    program = schedc.compile("1f1b", P=1, M=1)
    ranks = together(Mesh(1), small_moe(1), program, cells_for(ExpertPlan(overlap=True), None))
    ((_, executor),) = ranks.executors.items()
    parts = [part_of(step) for step in executor.code.steps]

    def during(exchange: str) -> set[str]:
        begin, end = parts.index(f"start {exchange}"), parts.index(f"wait {exchange}")
        return {part for part in parts[begin:end] if part.startswith("run")}

    assert during("forward of 0.dispatch.node") == {"run forward of 0.shared"}
    assert during("forward of 0.combine.node") == set()
    assert "run backward of 0.shared" in during("backward of 0.combine.node")
    assert "run weight of 0.experts" in during("backward of 0.dispatch.node")


def test_traces_tell_the_parts_of_a_cell() -> None:
    program = schedc.compile("dualpipev", P=2, M=4)
    pipe = Pipeline(small_moe(4), program, loss_fn=next_token_loss, in_process=True, cells=listed)
    pipe.step(*tokens(4), trace=True)
    intervals = pipe.trace()
    parts = {x.part for spans in intervals.values() for x in spans}
    assert {"run forward of 0.attention", "start backward of 0.combine.node", "run weight of 0.experts"} <= parts
    cells = [x for spans in intervals.values() for x in spans if program.kind[x.row] == InstructionKind.CELL]
    whole = compare(program, measured_costs(program, [intervals]), intervals)
    assert len({x.row for x in cells}) < len(cells)
    # What instructions took is at least what their micro-steps took.
    computed = sum(x.end - x.start for spans in intervals.values() for x in spans if x.part) / 1e6
    assert sum(whole.measured_busy) >= computed
    names = {event["name"] for event in chrome_trace(program, intervals)["traceEvents"]}
    assert any(name.endswith("OVERLAP_F_B run backward of 0.experts") for name in names)


def test_a_failure_inside_a_cell_names_its_part() -> None:
    program = schedc.compile("dualpipev", P=1, M=4)
    model = small_moe(4)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True, cells=listed)
    model.blocks[1].mlp.experts.register_forward_hook(_fail)
    with pytest.raises(InstructionError, match=r"0F0 \(run forward of 0.experts\)\n  --> dualpipev.sched"):
        pipe.step(*tokens(4))


def _fail(*_: Any) -> None:
    raise ValueError("no")


def test_hugging_face_layers_are_cut_like_others() -> None:
    """Masks and rotary embeddings, a tuple, go to every segment that has an attention."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        decoder_sparse_step=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).double()
    swap_experts(model)
    program = schedc.compile("dualpipev", P=2, M=4)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True, cells=listed)
    batch, targets = tokens(4)
    assert differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets)) == []


def test_measured_times_of_segments_become_a_cell_table() -> None:
    program = schedc.compile("dualpipev", P=2, M=4)
    pipe = Pipeline(small_moe(8), program, loss_fn=next_token_loss, in_process=True, cells=serial)
    pipe.step(*tokens(4), trace=True)
    costs = measured_cell_costs([{rank: list(_on_time(spans)) for rank, spans in pipe.trace().items()}])
    segments, exchanges = dict(costs.segments), dict(costs.exchanges)
    assert sorted(segments) == ["attention", "dense", "experts", "permute", "post", "shared"]
    assert segments == {role: times for role, times in COSTS.segments if role in segments}
    there, back = (dict(COSTS.exchanges)["dispatch.node"][half] for half in (0, 1))
    rows = Times(there, back)
    assert exchanges == {"combine.node": rows, "dispatch.node": rows, "routing.node": Times(there)}
    whole = parse_costs(Source("costs.toml", dump_costs(Costs(cell=CellTable(costs)))))
    assert whole.cell is not None
    assert whole.cell.costs == costs
    with pytest.raises(RuntimeFault, match="one exchange after the other"):
        measured_cell_costs([_traced(program, listed)])
    with pytest.raises(RuntimeFault, match="have no cells"):
        measured_cell_costs([{}])


def _on_time(spans: list[Interval]) -> Iterator[Interval]:
    """The intervals with the times of `COSTS` in milliseconds, one after the other."""
    halves = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)
    clock = 0
    for span in spans:
        part = Micro.parse(span.part)
        took = 0.0
        if part is not None and part.action is not Action.START:
            took = {**dict(COSTS.segments), **dict(COSTS.exchanges)}[part.role][halves.index(part.half)]
        yield span._replace(start=clock, end=clock + int(1e6 * took))
        clock += int(1e6 * took)


def _traced(program: Any, cells: Any) -> Any:
    pipe = Pipeline(small_moe(4), program, loss_fn=next_token_loss, in_process=True, cells=cells)
    pipe.step(*tokens(program.microbatches), trace=True)
    return pipe.trace()


def test_emulated_time_is_that_of_the_table() -> None:
    """On one rank nothing arrives late: what exchanges take is exact, and what they expose as predicted."""
    program = schedc.compile("dualpipev", P=1, M=4)
    ranks = together(Mesh(1), small_moe(4), program, listed)
    ((place, executor),) = ranks.executors.items()
    unit = 2e-4
    device = Device(COSTS, unit)
    executor.code = device.code(executor.code)
    device.begin()
    began = perf_counter()
    ranks.step()
    wall = perf_counter() - began
    carried = exposed = computed = 0.0
    shapes = {index: stage.shape for index, stage in ranks.stages[place].items()}
    for x in program.instructions(0):
        pair = x.kind is InstructionKind.CELL
        kind = f"F{OpKind(x.backward).name}" if pair else x.kind.name
        forward = shapes[x.stage] if kind[0] == "F" else None
        backward = shapes[x.stage2 if pair else x.stage] if kind != "F" else None
        found = predict(listed(kind, forward, backward), forward, backward, COSTS)
        carried, exposed = carried + found.communication * unit, exposed + found.exposed * unit
        computed += found.compute * unit
    assert sum(spent.carried for spent in device.spent.values()) == pytest.approx(carried)
    assert device.busy == pytest.approx(computed)
    stood = sum(spent.exposed for spent in device.spent.values())
    assert exposed * (1 - 1e-6) <= stood <= 1.5 * exposed + 0.05  # a busy machine only adds
    assert wall >= computed + exposed
