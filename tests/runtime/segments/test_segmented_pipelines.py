"""Pipelines of cells: bits of the reference, messages, traces, failures and measured times."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.program import Action, Half
from schedc.cell.schedule import cell_program
from schedc.cell.serial import serial
from schedc.cell.standard_blocks import BESIDE_LAYERS
from schedc.cell.table import CellTable
from schedc.ir.plan import Balance, ExpertSizes, Topology
from schedc.ir.program import InstructionKind
from schedc.plan import Plan
from schedc.plan.counts.copy_times import copy_time
from schedc.source import Source
from schedc.step.costs.costs import Costs, dump_costs, parse_costs
from schedc_runtime import Cut, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.cell_programs import cell_source
from schedc_runtime.execute.executor import InstructionError, Interval
from schedc_runtime.measure.step_trace import (
    TracedStep,
    chrome_trace,
    compare_traces,
    measured_cell_costs,
    measured_costs,
)
from schedc_runtime.moe.huggingface import swap_experts
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.testing import pool
from support.needs import needed
from support.runtime_cases import differences, next_token_loss, oracle, plain, small_gpt, tokens
from support.segmented_cases import COSTS, listed, shuffled, small_moe, together, unequal
from support.sweeps import in_sweeps, swept

pytestmark = pytest.mark.slow

STEPS: dict[str, dict[str, int]] = {
    "dualpipev": {"P": 2, "M": 4}, "zbv": {"P": 2, "M": 3}, "1f1b": {"P": 3, "M": 3}, "dualpipe": {"P": 2, "M": 4},
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "model"), swept([*product(STEPS, ("moe", "dense"))], [("dualpipev", "moe"), ("1f1b", "dense")])
)
def test_pipelines_of_cells_equal_the_reference(schedule: str, model: str) -> None:
    """Dense and MoE blocks mixed, and unequal numbers of them in the two halves of a pair."""
    program = schedc.compile(schedule, **STEPS[schedule])
    whole = small_moe(3, 2) if model == "moe" else small_gpt(5)
    cut = Cut(segmented=model == "dense")
    batch, targets = tokens(program.microbatches)
    pipe = Pipeline(whole, program, loss_fn=next_token_loss, in_process=True, cells=listed, cut=cut, example=batch)
    expected = oracle(pipe, batch, targets)
    assert differences(pipe, pipe.step(batch, targets), expected) == []
    torch.testing.assert_close(pipe.evaluate(batch, targets), expected.loss, rtol=1e-12, atol=1e-14)
    pipe.close()


def test_times_of_parts_beside_layers_order_no_cell_of_the_runtime() -> None:
    """Embedding and head are in the first and last segments of a stage that runs; the nodes of prices are not there."""
    beside = {role: SegmentTimes(500, 500, 500) for role in BESIDE_LAYERS}
    costs = CellCosts.of({**dict(COSTS.segments), **beside}, dict(COSTS.exchanges))
    program, plan = schedc.compile("dualpipev", P=2, M=4), Plan(overlap=True)
    batch, targets = tokens(program.microbatches)
    pipe = Pipeline(
        small_moe(3), program, loss_fn=next_token_loss, in_process=True, cells=costs, plan=plan, example=batch
    )
    assert differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets)) == []
    shapes = [stage.shape for held in pipe._stages.values() for stage in held.values() if stage.is_cut]
    assert len(shapes) == 4
    assert {node.role for shape in shapes for node in shape.nodes}.isdisjoint(BESIDE_LAYERS)
    ordered, plain = cell_source(plan, costs), cell_source(plan, COSTS)
    assert all(ordered("FB", shape, shapes[0]) == plain("FB", shape, shapes[0]) for shape in shapes)


def test_cells_of_copies_leave_time_for_one_copy() -> None:
    """As prices do, where the costs have no time of copies: the dispatch is long, so that a copy moves other steps."""
    costs = CellCosts.of(dict(COSTS.segments), {"dispatch.node": 30.0, "combine.node": 30.0})
    sizes = {
        "experts": ExpertSizes(8, 2, width=64, hidden=16),
        "topology": Topology(1, 4),
        "tokens": 64,
        "dtype": "fp32",
    }
    plan = Plan(overlap=True, balance=Balance("microbatch"), **sizes)  # type: ignore[arg-type]
    copy = copy_time(plan, costs)
    assert copy is not None
    assert copy.forward == pytest.approx(3 * 64 * 30 / (64 * 2 * 3 / 4))
    (shape,) = set(CellTable(costs.with_exchange("hot.node", copy)).shapes(2))
    timed = costs.with_exchange("hot.node", copy)
    ordered = cell_source(plan, costs)("FB", shape, shape)
    assert ordered == cell_program("FB", shape, shape, timed) != cell_program("FB", shape, shape, costs)
    given = cell_source(plan, costs.with_exchange("hot.node", SegmentTimes(0.0)))("FB", shape, shape)
    assert given == cell_program("FB", shape, shape, costs)


@in_sweeps(
    "runtime/segments/test_segmented.py::test_any_order_of_micro_steps_gives_the_same_bits",
    "test_pipelines_of_cells_equal_the_reference",
)
@pytest.mark.sweep
@settings(max_examples=swept(10, 2))
@given(
    seed=st.integers(0, 2**32),
    method=st.sampled_from(["flat", "hierarchical", "allgather"]),
    host_lane=st.booleans(),
)
def test_any_cells_give_the_same_bits_on_expert_groups(seed: int, method: Any, host_lane: bool) -> None:
    program = schedc.compile("dualpipev", P=1, M=2)
    mesh = Mesh(1, experts=4, per_node=2)
    if not _SERIAL:
        ranks = together(mesh, small_moe(2), program, serial)
        ranks.step()
        _SERIAL.update(ranks.results())
    ranks = together(mesh, small_moe(2), program, shuffled(seed), method, host_lane)
    ranks.step()
    results = ranks.results()
    assert {place: unequal(results[place], _SERIAL[place]) for place in results} == {place: [] for place in _SERIAL}


_SERIAL: dict[Any, dict[str, Tensor]] = {}


def test_expert_groups_train_the_undivided_model() -> None:
    program = schedc.compile("dualpipev", P=2, M=4)
    mesh = Mesh(2, experts=2)
    ranks = together(mesh, small_moe(), program, listed)
    ranks.step()
    results = ranks.results()
    total: dict[str, Tensor] = {}
    model = small_moe()
    for replica in range(2):
        batch, targets = tokens(4, seed=replica + 1)
        for name, grad in plain(model, batch, targets, 4)[1].items():
            total[name] = total[name] + grad if name in total else grad
    seen = set()
    for place, grads in results.items():
        for name, grad in grads.items():
            if name.startswith("loss"):
                continue
            seen.add(name)
            if ".experts." in name:  # each rank has half of the experts, whose tokens came from everywhere
                expected = total[name].chunk(2)[place.replica]
            else:
                grad = grad + results[place._replace(replica=1 - place.replica)][name]
                expected = total[name]
            torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-13)
    assert seen == {name for name, _ in model.named_parameters()}


@in_sweeps("test_pipelines_of_cells_equal_the_reference", "runtime/parity/test_parity.py::test_processes")
@pytest.mark.processes
def test_cells_on_processes() -> None:
    """With the host as a lane sizes are waited for where the program says, behind compute of the other microbatch."""
    sizes = {"P": 2, "M": 4}
    arguments = {"schedule": "dualpipev", "sizes": sizes, "experts": 2}
    assert pool(4).run("support.segmented_cases:parity", timeout=120, **arguments) == [[]] * 4


def test_messages_leave_before_the_end_of_a_cell_and_are_waited_for_where_a_half_begins() -> None:
    program = schedc.compile("dualpipev", P=2, M=6)
    ranks = together(Mesh(2), small_moe(3), program, listed)
    early = late = 0
    for place, executor in ranks.executors.items():
        steps = executor.code.steps
        posts = [s.row for s in steps if s.instruction.kind in (InstructionKind.SEND, InstructionKind.RECV)]
        assert posts == sorted(posts)  # in the order that all ranks agree on
        rows = {row for step in steps for row in range(step.row, step.row + step.width)}
        start, end = program.rank_start[place.pipeline : place.pipeline + 2].tolist()
        assert rows == set(range(start, end))
        for before, step, after in zip([steps[-1], *steps], steps, steps[1:], strict=False):
            if step.instruction.kind is InstructionKind.SEND and after.row < step.row:
                early += after.label != ""
            if step.instruction.kind is InstructionKind.WAIT and step.operands.slot >= 0:
                assert after.label in ("begin", "begin backward")
                late += before.row == after.row
    assert early > 0
    assert late > 0


def test_a_block_alone_computes_while_it_waits() -> None:
    """What `overlap auto` gives F and B outside of pairs: three of four exchanges are filled."""
    program = schedc.compile("1f1b", P=1, M=1)
    ranks = together(Mesh(1), small_moe(1), program, cell_source(Plan(overlap=True), None))
    ((_, executor),) = ranks.executors.items()
    parts = [step.label for step in executor.code.steps]

    def during(exchange: str) -> set[str]:
        begin, end = parts.index(f"start {exchange}"), parts.index(f"wait {exchange}")
        return {part for part in parts[begin:end] if part.startswith("run")}

    assert during("forward of 0.dispatch.node") == {"run forward of 0.shared"}
    assert during("forward of 0.combine.node") == set()
    assert "run backward of 0.shared" in during("backward of 0.combine.node")
    assert "run weight of 0.experts" in during("backward of 0.dispatch.node")


def test_traces_tell_the_parts_of_a_cell() -> None:
    program = schedc.compile("dualpipev", P=2, M=4)
    batch, targets = tokens(4)
    pipe = Pipeline(small_moe(3), program, loss_fn=next_token_loss, in_process=True, cells=listed, example=batch)
    pipe.step(batch, targets, trace=True)
    intervals = pipe.trace()
    parts = {x.part for spans in intervals.values() for x in spans}
    assert {"run forward of 0.attention", "start backward of 0.combine.node", "run weight of 0.experts"} <= parts
    cells = [x for spans in intervals.values() for x in spans if program.kind[x.row] == InstructionKind.CELL]
    whole = compare_traces(program, measured_costs(program, [intervals]), intervals)
    assert len({x.row for x in cells}) < len(cells)
    # Instructions take at least the time of their micro-steps.
    computed = sum(x.end - x.start for spans in intervals.values() for x in spans if x.part) / 1e6
    assert sum(whole.measured_busy) >= computed
    names = {event["name"] for event in chrome_trace(program, intervals)["traceEvents"]}
    assert any(name.endswith("OVERLAP_F_B run backward of 0.experts") for name in names)


def test_a_failure_inside_a_cell_names_its_part() -> None:
    program = schedc.compile("dualpipev", P=1, M=4)
    model = small_moe(2)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True, cells=listed)
    model.blocks[1].mlp.experts.register_forward_hook(_fail)
    with pytest.raises(InstructionError, match=r"0F0 \(run forward of 0.experts\)\n  --> dualpipev.sched"):
        pipe.step(*tokens(4))


def _fail(*_: Any) -> None:
    raise ValueError("no")


def test_hugging_face_layers_are_cut_like_others() -> None:
    """Masks and rotary embeddings, a tuple, go to every segment that has an attention."""
    transformers = needed("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        decoder_sparse_step=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).double()
    swap_experts(model)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.inner(tokens).logits
            return logits

    program = schedc.compile("dualpipev", P=2, M=4)
    batch, targets = tokens(4)
    pipe = Pipeline(Logits(), program, loss_fn=next_token_loss, in_process=True, cells=listed, example=batch)
    assert differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets)) == []


def test_measured_times_of_segments_become_a_cell_table() -> None:
    program = schedc.compile("dualpipev", P=2, M=4)
    batch, targets = tokens(4)
    pipe = Pipeline(small_moe(4), program, loss_fn=next_token_loss, in_process=True, cells=serial, example=batch)
    pipe.step(batch, targets, trace=True)
    trace = {rank: list(_on_time(spans)) for rank, spans in pipe.trace().items()}
    costs = measured_cell_costs([trace])
    segments, exchanges = dict(costs.segments), dict(costs.exchanges)
    assert sorted(segments) == ["attention", "dense", "experts", "permute", "post", "shared"]
    assert segments == {role: times for role, times in COSTS.segments if role in segments}
    there, back = (dict(COSTS.exchanges)["dispatch.node"][half] for half in (0, 1))
    rows = SegmentTimes(there, back)
    assert exchanges == {"combine.node": rows, "dispatch.node": rows, "routing.node": SegmentTimes(there)}
    whole = parse_costs(Source("costs.toml", dump_costs(Costs(cell=CellTable(costs)))))
    assert whole.cell is not None
    assert whole.cell.costs == costs
    emptier = {rank: list(_waiting(spans)) for rank, spans in trace.items()}
    assert measured_cell_costs([emptier]).exchanges != costs.exchanges
    assert measured_cell_costs([emptier], [trace]).exchanges == costs.exchanges
    for other, problem in (([], "other numbers of steps"), ([{0: trace[0]}], "other micro-steps")):
        with pytest.raises(RuntimeFault, match=problem):
            measured_cell_costs([trace], other)
    with pytest.raises(RuntimeFault, match="one exchange after the other"):
        measured_cell_costs([_traced(program, listed)])
    with pytest.raises(RuntimeFault, match="have no cells"):
        measured_cell_costs([{}])


def _on_time(spans: list[Interval]) -> Iterator[Interval]:
    """The intervals with the times of `COSTS` in milliseconds, one after the other."""
    halves = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)
    clock = 0
    for span in spans:
        part = TracedStep.parse(span.part)
        took = 0.0
        if part is not None and part.action is not Action.START:
            took = {**dict(COSTS.segments), **dict(COSTS.exchanges)}[part.role][halves.index(part.half)]
        yield span._replace(start=clock, end=clock + int(1e6 * took))
        clock += int(1e6 * took)


def _waiting(spans: list[Interval]) -> Iterator[Interval]:
    """The intervals of a rank with fewer rows: its waits end 5 ms later."""
    late = 0
    for span in spans:
        part = TracedStep.parse(span.part)
        more = 5_000_000 if part is not None and part.action is Action.WAIT else 0
        yield span._replace(start=span.start + late, end=span.end + late + more)
        late += more


def _traced(program: Any, cells: Any) -> Any:
    batch, targets = tokens(program.microbatches)
    pipe = Pipeline(small_moe(4), program, loss_fn=next_token_loss, in_process=True, cells=cells, example=batch)
    pipe.step(batch, targets, trace=True)
    return pipe.trace()
