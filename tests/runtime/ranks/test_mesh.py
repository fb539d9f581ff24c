"""Replicas of a pipeline: the same weights on other batches, gradients and loss averaged, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedc.compiler import compile as compile_schedule
from schedc.ir.parallel import Parallel
from schedc.plan import Hot, Level, Method, Plan, Recompute, Topology
from schedc_runtime import Pipeline
from schedc_runtime.data_parallel.gradient_sums import is_expert
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.pipeline.build.apply_plan import mesh_for
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.ranks.network import Network
from schedc_runtime.testing import pool
from support.mesh_cases import balanced_moe, batch_of, expected, same
from support.moe_layers import set_loss_scale, update_router_biases
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.segmented_cases import small_moe
from support.sweeps import halved, in_sweeps, swept


def test_places_cover_the_world_and_groups_partition_it() -> None:
    mesh = Mesh(pipeline=3, experts=4, data=2, per_node=2)
    places = [mesh.coordinate(process) for process in range(mesh.size)]
    assert [mesh.process(place) for place in places] == list(range(24))
    assert mesh.coordinate(13) == Coordinate(pipeline=1, replica=5)
    assert mesh.replicas_of(Coordinate(1, 5)) == list(range(8, 16))
    assert mesh.sharing(Coordinate(1, 5)) == [12, 13, 14, 15]
    assert mesh.holding_the_same(Coordinate(1, 5)) == [9, 13]
    assert list(mesh.pipelines())[5] == [5, 13, 21]
    assert mesh.names[13] == "rank 1 of replica 5"
    assert Mesh(2).names == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    ("mesh", "sharing", "same"),
    [
        (Mesh(2, experts=4, data=2, tensor=2), [12, 13, 14, 15], [9, 13]),
        (Mesh(2, experts=2, data=2, tensor=4), [12, 13], [9, 11, 13, 15]),
    ],
)
def test_expert_groups_span_tensor_ranks(mesh: Mesh, sharing: list[int], same: list[int]) -> None:
    """Neighbours among 8 processes with the same stages share experts."""
    place = mesh.coordinate(13)
    assert (mesh.replicas, mesh.peers, mesh.expert_groups) == (8 // mesh.tensor, 8, 8 // mesh.experts)
    assert (mesh.sharing(place), mesh.holding_the_same(place)) == (sharing, same)
    assert mesh.splitting_the_same(place) == list(range(8 + 5 % mesh.tensor, 16, mesh.tensor))
    assert mesh.splitting(place) == list(range(12, 12 + mesh.tensor))


def test_tensor_ranks_are_neighbours_and_have_one_batch() -> None:
    """Groups of 2 pipeline ranks x 3 replicas x 2 tensor ranks: each is a partition of the processes."""
    mesh = Mesh(2, data=3, tensor=2)
    places = [mesh.coordinate(process) for process in range(mesh.size)]
    assert [mesh.process(place) for place in places] == list(range(12))
    assert mesh.replicas == 3
    place = Coordinate(1, 2, 1)
    assert mesh.process(place) == 11
    assert mesh.name(place) == "rank 1 of replica 2, tensor rank 1"
    assert mesh.splitting(place) == [10, 11]
    assert mesh.splitting_the_same(place) == [7, 9, 11]
    assert mesh.replicas_of(place) == [6, 7, 8, 9, 10, 11]
    assert list(mesh.pipelines())[5] == [5, 11]
    for among in (mesh.splitting, mesh.splitting_the_same, mesh.holding_the_same, mesh.replicas_of, mesh.sharing):
        groups = {tuple(among(each)) for each in places}
        assert sorted(process for group in groups for process in group) == list(range(12))


@pytest.mark.parametrize(
    ("names", "ranks", "expected"),
    [
        (("pp", "dp", "tp"), torch.arange(12).view(2, 3, 2), Mesh(2, data=3, tensor=2)),
        (("tp",), torch.arange(4), Mesh(1, tensor=4)),
        (("pp", "dp", "cp", "tp"), torch.arange(24).view(2, 3, 2, 2), Mesh(2, data=6, tensor=2, context=2)),
        (("pp", "tp", "dp"), torch.arange(8).view(2, 2, 2), "in this order"),
        (("pp", "tp"), torch.arange(4).view(2, 2).T, "in another order"),
    ],
)
def test_the_mesh_of_torch(names: tuple[str, ...], ranks: torch.Tensor, expected: Mesh | str) -> None:
    torch_mesh = SimpleNamespace(mesh_dim_names=names, mesh=ranks)
    if isinstance(expected, Mesh):
        assert Mesh.of_device_mesh(torch_mesh) == expected
        return
    with pytest.raises(RuntimeFault, match=expected):
        Mesh.of_device_mesh(torch_mesh)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline": 0}, "without ranks"),
        ({"pipeline": 1, "experts": 3, "tensor": 2}, "3 ranks share the experts, 2 split products, and neither"),
        ({"pipeline": 1, "experts": 4, "per_node": 3}, "does not divide them"),
        ({"pipeline": 1, "high_priority": ("rail", "wire")}, "`wire`.*(\n.*)*comm, rail, node, replicas"),
        ({"pipeline": 1, "high_priority": "rail"}, "`rail`.*(\n.*)*give a tuple"),
    ],
)
def test_a_mesh_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        Mesh(**arguments)


def test_the_mesh_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Mesh.of_environment(2, 8) == Mesh(2, 8, 2, 4)
    assert Mesh.of_environment(2, 4, tensor=2, context=2) == Mesh(2, 4, 4, 4, tensor=2, context=2)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(RuntimeFault, match="32 processes cannot be 3 pipeline ranks") as refused:
        Mesh.of_environment(3)
    assert "--nnodes" not in refused.value.help


@pytest.mark.parametrize(("mesh", "whom"), [(Mesh(4), "for 4 ranks.* has 6"), (Mesh(2, data=2), "times 2, .* has 6")])
def test_a_surplus_node_is_refused_with_the_way_to_wait(mesh: Mesh, whom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts ranks on each node of a range such as ``--nnodes 2:3``."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 6)
    with pytest.raises(RuntimeFault, match=whom) as refused:
        Network(mesh, None, False, 20.0, torch.device("cpu"))
    assert "a fixed number in torchrun --nnodes" in refused.value.help
    with pytest.raises(RuntimeFault, match="6 processes cannot be 4 pipeline ranks") as refused:
        Mesh.of_environment(4)
    assert "a fixed number in torchrun --nnodes" in refused.value.help
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeFault, match="2 processes cannot be 4 pipeline ranks") as refused:
        Mesh.of_environment(4)
    assert "--nnodes" not in refused.value.help, "too few were started"


def test_the_mesh_of_a_parallel_line() -> None:
    """What a pipeline does not carry out is refused with the way out, before any rank is asked."""
    program, of_node = compile_schedule("1f1b", P=2, M=4), Topology(2, 2)
    plan = Plan(parallel=Parallel(ep=4, dp=8, node=2))
    assert mesh_for(plan, program, None) == Mesh(2, 4, 2, 2)
    assert mesh_for(replace(plan, topology=of_node), program, Mesh(2, 4, 2, 2)) == Mesh(2, 4, 2, 2)
    whole = Plan(parallel=Parallel(dp=2, zero=3))
    assert mesh_for(whole, program, None) == Mesh(2, data=2, shard_dense=True)
    assert mesh_for(Plan(parallel=Parallel(tp=2, dp=3)), program, None) == Mesh(2, data=3, tensor=2)
    for sizes, wanted in (
        ({"ep": 2}, Mesh(2, 2, 1, 2, tensor=2)), ({"ep": 2, "dp": 3}, Mesh(2, 2, 3, 2, tensor=2)),
        ({"ep": 4, "dp": 6}, Mesh(2, 4, 3, 4, tensor=2)), ({"tp": 4, "ep": 2, "dp": 2}, Mesh(2, 2, 2, 2, tensor=4)),
        ({"cp": 2, "ep": 4}, Mesh(2, 4, 1, 4, tensor=2, context=2)),
        ({"tp": 1, "cp": 4, "ep": 2, "dp": 3}, Mesh(2, 2, 6, 2, context=4)),
        ({"cp": 2, "ep": 8, "dp": 4}, Mesh(2, 8, 2, 8, tensor=2, context=2)),
    ):  # fmt: skip
        of_attention = Parallel(**{"tp": 2, "of": "attention", "node": 8, **sizes})
        assert mesh_for(Plan(parallel=of_attention), program, None) == wanted
        assert (wanted.replicas, wanted.peers) == (of_attention.cp * of_attention.dp, of_attention.per_rank)
    for refused, mesh, words in (
        (Parallel(tp=2, ep=2), None, "tp 2 and ep 2 without `of attention`.*(\n.*)*export PLAN --to megatron"),
        (Parallel(tp=2, of="attention", ep=3, dp=3), None, "ep 3; a pipeline shares experts where one of 2 and 3"),
        (Parallel(tp=2, dp=2, zero=3), None, "tp 2 and zero 3"),
        (Parallel(tp=2), Mesh(2), "data ranks x 2 tensor ranks, the mesh has 2 x 1 x 1"),
        (Parallel(cp=2, dp=2, zero=3), None, "cp 2 and zero 3.*(\n.*)*`cp 1`"),
        (Parallel(tp=2, of="attention", cp=3, ep=4, dp=2), None, "cp 3 and ep 4;.* one of 6 and 4 divides the other"),
        (Parallel(cp=2, dp=2), Mesh(2, data=4), "data ranks, 2 replicas share each sequence, the mesh has 2 x 1 x 4"),
        (Parallel(dp=2, zero=2), None, "zero 2.*(\n.*)*`zero 3`"),
        (Parallel(dp=2), Mesh(2, data=4), "2 x 1 x 2 pipeline.*2 x 1 x 4"),
        (Parallel(dp=2, zero=3), Mesh(2, data=2), "2 x 1 x 2 .* with sharded parameters, the mesh has 2 x 1 x 2"),
    ):
        with pytest.raises(RuntimeFault, match=words):
            mesh_for(Plan(parallel=refused), program, mesh)
    model = small_gpt(blocks=2)
    with pytest.raises(RuntimeFault, match="in_process=True and 2 tensor ranks"):
        Pipeline(model, program, loss_fn=next_token_loss, plan=Plan(parallel=Parallel(tp=2)), in_process=True)


CASES = [("1f1b", {"M": 3}), ("zbh1", {"M": 3}), ("dualpipe", {"M": 4}), ("dualpipev", {"M": 4})]


@pytest.mark.sweep
@pytest.mark.processes
def test_processes() -> None:
    cases = [
        ("dualpipe", {"P": 2, "M": 4}, 1, 2),
        ("zbh1", {"P": 1, "M": 2}, 2, 2),
        ("zbv", {"P": 2, "M": 4}, 2, 1),
        ("zbh1", {"P": 2, "M": 3}, 1, 2, True),
    ]
    cases = swept(cases, cases[2:])
    everyone = pool(4).run("support.mesh_cases:parity", cases=cases, timeout=120)
    for number, case in enumerate(cases):
        every_name = {name for name, _ in small_gpt(tied=len(case) > 4).named_parameters()}
        assert {name for rank in everyone for name in rank[number]} == every_name, case


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "sizes"), halved(CASES))
def test_in_process(schedule: str, sizes: dict[str, int]) -> None:
    program = compile_schedule(schedule, P=2, **sizes)
    mesh = Mesh(2, 2, 2)
    batch, targets = batch_of(mesh, program.microbatches)
    example = batch.chunk(mesh.replicas)[0]
    pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, mesh=mesh, in_process=True, example=example)
    wanted = expected(pipe, batch, targets)
    loss = pipe.step(batch, targets)
    assert loss.item() == pytest.approx(wanted.loss.item(), rel=1e-12)
    compared = 0
    for stage in pipe._held():  # the stages of every replica and copy
        for name, parameter in stage.module.named_parameters():
            assert same(parameter.grad, wanted.grads[name]), name
            compared += 1
    copies = 2 if schedule == "dualpipe" else 1
    assert compared == copies * mesh.replicas * len(wanted.grads)
    pipe.evaluate(batch, targets)


SPREADS = [(4, 1), (2, 2), (1, 4)]
"""Expert ranks and further replicas of the same four batches."""


@pytest.mark.processes
def test_processes_have_one_auxiliary_loss_and_one_load() -> None:
    assert pool(4).run("support.mesh_cases:auxiliary", meshes=[(2, 2)], timeout=60) == [[[]]] * 4


@in_sweeps("test_processes_have_one_auxiliary_loss_and_one_load")
@pytest.mark.slow
def test_the_auxiliary_loss_is_that_of_all_replicas_however_they_share_experts() -> None:
    """Microbatch m of all four has the loss, the gradients and the biases of one rank with all their tokens."""
    program = compile_schedule("dualpipev", P=1, M=2)
    batch, targets = batch_of(Mesh(1, 4), 2)
    whole = balanced_moe()
    set_loss_scale(whole, 0.5)
    for m in range(2):
        rows = torch.arange(len(batch)).view(4, 2, -1)[:, m].flatten()
        (next_token_loss(whole(batch[rows]), targets[rows]) / 2).backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    losses = {name: layer.statistics.balance_loss for name, layer in moe_layers(whole)}
    update_router_biases(whole)
    plans = [
        Plan(overlap=True, method=Method.HIERARCHICAL, hot=Hot(1, 1.0)),
        Plan(overlap=True, recompute=(Recompute(Level.FULL),) * 2),
        Plan(),
    ]
    first = set()
    for (experts, data), plan in zip(SPREADS, plans, strict=True):
        mesh = Mesh(1, experts, data, per_node=experts // 2 or 1)
        pipe = Pipeline(
            balanced_moe(), program, loss_fn=next_token_loss, mesh=mesh, plan=plan, in_process=True,
            example=batch.chunk(mesh.replicas)[0],
        )  # fmt: skip
        pipe.step(batch, targets)
        stages = [(place, stage.module) for place in pipe.places for stage in pipe.held(place)]
        for place, (name, parameter) in [(at, named) for at, module in stages for named in module.named_parameters()]:
            grad = wanted[name]
            assert grad is not None
            grad = grad.chunk(experts)[place.replica % experts] if is_expert(parameter) else grad
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-13, msg=f"{experts} {name}")
        layers = [named for _, module in stages for named in moe_layers(module)]
        for name, layer in layers:
            assert layer.statistics.balance_loss == pytest.approx(losses[name], rel=1e-12)
        first |= {layer.statistics.balance_loss for name, layer in layers if name.startswith("blocks.2.")}
        pipe.update_biases()
        for name, layer in layers:
            assert same(layer.router.bias, whole.get_submodule(name).router.bias)  # type: ignore[union-attr, arg-type]
    assert len(first) == 1  # its tokens have the same bits everywhere


@pytest.mark.processes
def test_replicas_that_differ_are_told() -> None:
    for told in pool(4).run("support.mesh_cases:disagreements", timeout=60):
        assert told[0] == "rank 1 of replica 0 and rank 1 of replica 1 differ in their weights of stage 1"
        assert "differ" in told[1] or "calls" in told[1] or "shape" in told[1]
        assert told[2] == "rank 0 of replica 0 and rank 0 of replica 1 differ in their plan, in `hot`"
        assert "differ in their routing of `blocks." in told[3]


@pytest.mark.processes
def test_a_failing_replica_is_told_to_all_before_their_timeout() -> None:
    """Also to ranks of other pipelines, which wait for it in a collective of experts or of replicas."""
    everyone = pool(4).run("support.mesh_cases:a_replica_fails", timeout=60)
    for rank, (kind, text, when) in enumerate(everyone):
        assert kind == ("InstructionError" if rank == 3 else "PeerFailure"), text
        assert "no such target" in text
        told = "" if rank == 3 else "rank 1 of replica 1 failed, and with it the step:\nInstructionError: "
        assert text.startswith(f"{told}rank 1 of replica 1 failed at "), text
        assert when == "soon"


@pytest.mark.slow
def test_all_ranks_in_one_process_go_on_after_a_failure() -> None:
    wrong: list[bool] = [True]

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if wrong:
            wrong.pop()
            raise ValueError("this once")
        return next_token_loss(output, targets)

    pipe = Pipeline(small_moe(), compile_schedule("1f1b", P=2, M=2), loss_fn=loss_fn, in_process=True,
                    mesh=Mesh(2, 2, high_priority=("comm",)))  # fmt: skip
    assert pipe.report().splitlines()[-1] == "priority: comm high (no effect: cpu has no streams)"
    with pytest.raises(InstructionError, match=r"^rank 1 of replica [01] failed at (.|\n)*this once"):
        pipe.step(*tokens(4))
    pipe.zero_grad()
    assert torch.isfinite(pipe.step(*tokens(4)))


@pytest.mark.slow
def test_a_batch_of_all_replicas_divides_into_the_microbatches_of_each() -> None:
    program = compile_schedule("1f1b", P=2, M=2)
    pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, mesh=Mesh(2, 1, 2), in_process=True)
    with pytest.raises(BatchRefused, match=r"6 rows .* do not divide into 2 microbatches for each of 2 replicas"):
        pipe.step(*tokens(6))
