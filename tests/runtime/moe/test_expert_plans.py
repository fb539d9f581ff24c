"""From the lines of a plan to a training step: experts over ranks, methods, overlap."""

from __future__ import annotations

import pytest
import torch

import schedc
from schedc.diagnostics import DiagnosticError
from schedc.ir.program import Program
from schedc.plan import Capacity, ExpertSizes, Plan
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.data_parallel.gradient_sums import is_expert
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.testing import pool
from support.expert_cases import batch_of, blocks_for, compiled, in_process, model, train
from support.runtime_cases import next_token_loss, plain
from support.sweeps import in_sweeps, swept

pytestmark = pytest.mark.slow

TWO_NODES = "  experts 8 top 2\n  topology nodes 2 x 1\n"
ONE_NODE = "  experts 8 top 2\n  topology nodes 1 x 2\n"
CASES = [
    ("dualpipev", {"P": 2, "M": 4}, f"{TWO_NODES}  alltoall hierarchical\n  overlap auto"),
    ("zbh1_overlap", {"P": 2, "M": 3}, f"{TWO_NODES}  alltoall auto\n  overlap auto"),
    ("dualpipe", {"P": 2, "M": 4}, f"{TWO_NODES}  alltoall allgather\n  overlap auto"),
    ("1f1b_overlap", {"P": 2, "M": 4}, f"{TWO_NODES}  alltoall flat\n  overlap auto\n  capacity 1.25 drop probs"),
]


@in_sweeps("test_sharing_experts_trains_the_undivided_model", "runtime/moe/test_hot.py::test_processes")
@pytest.mark.processes
@pytest.mark.sweep
def test_processes() -> None:
    cases = swept(CASES, CASES[:1])
    for wrong in pool(4).run("support.expert_cases:parity", cases=cases, timeout=240):
        assert wrong == [[]] * len(cases)


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["hierarchical", *swept(["flat", "allgather"], [])])
def test_sharing_experts_trains_the_undivided_model(method: str) -> None:
    lines = f"  experts 8 top 2\n  topology nodes 2 x 2\n  alltoall {method}\n  overlap auto"
    check_whole_model(compiled("1f1b", {"P": 2, "M": 2}, lines))


@pytest.mark.parametrize(
    ("schedule", "lines"), [("dualpipev", f"{ONE_NODE}  recompute medium"), ("hanayo", f"{ONE_NODE}  overlap auto")]
)
def test_stages_of_paddings_train_the_undivided_model(schedule: str, lines: str) -> None:
    """They hand on what they get: as a forward, as a backward, and as either half of a pair."""
    program = compiled(schedule, {"P": 2, "M": 4}, lines, layers="4 dense 1 pad 4 at [2, 3, 4, 5]")
    check_whole_model(program)


def check_whole_model(program: Program) -> None:
    """Against autograd of the whole model, all its experts in place, on the batches of all replicas."""
    example, _ = batch_of(program, 1)
    pipe = Pipeline(model(balance=0.0), program, loss_fn=next_token_loss, in_process=True, example=example)
    batch, targets = batch_of(program, pipe.mesh.replicas)
    loss = pipe.step(batch, targets)
    whole = model(balance=0.0)
    expected, wanted = plain(whole, batch, targets, program.microbatches * pipe.mesh.replicas)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    compared = set()
    for place, held in pipe._stages.items():
        for name, parameter in [named for stage in held.values() for named in stage.module.named_parameters()]:
            grad = wanted[name]
            if is_expert(parameter):
                grad = grad.chunk(pipe.mesh.experts)[place.replica]
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-13)
            compared.add(name)
    assert compared == {name for name, _ in whole.named_parameters()}


@in_sweeps("runtime/moe/test_hot.py::test_methods_agree_bit_by_bit", "runtime/moe/test_hot.py::test_processes")
def test_methods_agree_bit_by_bit_over_steps() -> None:
    states = []
    for method in ("flat", "hierarchical", "allgather"):
        lines = f"  experts 8 top 2\n  topology nodes 2 x 2\n  alltoall {method}\n  overlap auto"
        program = compiled("zbh1", {"P": 1, "M": 2}, lines, layers="2 dense 1")
        example, _ = batch_of(program, 1)
        pipe = Pipeline(model(blocks=2), program, loss_fn=next_token_loss, in_process=True, example=example)
        losses = train(pipe, 2)
        states.append({**pipe.full_state_dict(), "losses": torch.stack(losses)})
    for state in states[1:]:
        assert [name for name, value in states[0].items() if not torch.equal(value, state[name])] == []


def test_a_state_dict_of_the_whole_model_is_spread_and_put_together() -> None:
    case = ("1f1b", {"P": 2, "M": 2}, f"{TWO_NODES}  alltoall flat\n  overlap auto")
    pipe, _ = in_process(*case)
    whole = model(blocks=blocks_for(*case[:2])).state_dict()
    pipe.load_state_dict(whole)
    state = pipe.full_state_dict()
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (TWO_NODES.replace("8", "16"), {}, "the plan says `experts 16 top 2`"),
        (TWO_NODES, {"mesh": Mesh(2, 4)}, "the plan's topology is 2 nodes x 1 ranks"),
        ("  experts 8 top 2\n  topology nodes 3 x 1\n", {}, "experts"),
    ],
)
def test_a_plan_that_does_not_fit(lines: str, options: dict[str, Mesh], message: str) -> None:
    with pytest.raises((RuntimeFault, DiagnosticError), match=message):
        Pipeline(
            model(), compiled("1f1b", {"P": 2, "M": 2}, lines), loss_fn=next_token_loss, in_process=True, **options
        )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            Plan(ExpertSizes(8, 2), tokens=12, capacity=Capacity(1e-9)),
            "a capacity of 3e-09 tokens: 12 tokens",
        ),
        (Plan(capacity=Capacity(0.0)), "a capacity of 0"),
        (Plan(capacity=Capacity(float("nan"))), "a capacity of nan"),
    ],
)
def test_capacities_of_plans_made_in_python_are_checked(plan: Plan, message: str) -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    with pytest.raises(DiagnosticError, match=message) as caught:
        Pipeline(model(), program, loss_fn=next_token_loss, in_process=True, plan=plan)
    assert [finding.code for finding in caught.value.diagnostics] == ["S152"]


@in_sweeps(
    "runtime/recompute/test_recompute.py::test_every_level_gives_the_bits_of_none",
    "runtime/moe/test_hot.py::test_on_and_off_over_steps",
)
def test_recomputation_changes_no_bit_where_experts_are_hot() -> None:
    lines = f"{TWO_NODES}  alltoall hierarchical\n  overlap auto\n  hot 2\n"
    states = []
    for more in ("", "  recompute all medium", "  recompute all full adaptive(1.1)"):
        program = compiled("dualpipev", {"P": 1, "M": 2}, lines + more, layers="3 dense 1")
        example, _ = batch_of(program, 8)
        pipe = Pipeline(model(blocks=3), program, loss_fn=next_token_loss, in_process=True, example=example)
        losses = [pipe.step(*batch_of(program, 8 * pipe.mesh.replicas, seed=step)) for step in range(2)]
        layers = [layer for stage in pipe._held() for _, layer in moe_layers(stage.module)]
        assert sum(layer.statistics.hot_experts for layer in layers) > 0
        grads = {
            f"{place} {name}": parameter.grad
            for place, held in pipe._stages.items()
            for stage in held.values()
            for name, parameter in stage.module.named_parameters()
            if parameter.grad is not None
        }
        states.append({**grads, "losses": torch.stack(losses)})
    for state in states[1:]:
        assert [name for name, value in states[0].items() if not torch.equal(value, state[name])] == []
