"""The dense part of a pipeline under FSDP2: the same bits as whole replicas, with a part of the memory."""

from __future__ import annotations

import pytest
from torch import nn

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.data_parallel.fsdp import DenseSharding, DenseShards
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.testing import pool
from support.runtime_cases import next_token_loss, small_gpt


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "kind", "experts", "data", "rs"),
    [
        ("zbh1", "gpt", 1, 2, False),
        ("1f1b", "gpt", 1, 2, True),
        ("dualpipev", "moe", 2, 1, False),
        ("1f1b", "tied", 1, 2, False),
    ],
)
def test_sharded_dense_parts_give_the_bits_of_whole_ones(
    schedule: str, kind: str, experts: int, data: int, rs: bool
) -> None:
    arguments = {"schedule": schedule, "kind": kind, "experts": experts, "data": data, "rs": rs}
    for results in pool(4).run("runtime.data_parallel.sharding_cases:parity", timeout=120, **arguments):
        assert results["wrong"] == []
        assert results["compared"] > 40
        assert results["names sharded"] == results["names plain"]
        assert results["loaded plain"]
        assert results["loaded sharded"]
        assert results["sharded plain"] == 0
        assert results["sharded sharded"] > 10
        assert results["experts sharded"] == []
        if kind == "gpt":
            assert results["held sharded"] <= 0.51 * results["held plain"]


@pytest.mark.parametrize(
    ("schedule", "mesh", "in_process", "message"),
    [
        ("1f1b", Mesh(2, 1, 2), True, "all ranks are in this process"),
        ("1f1b", Mesh(2), False, "the mesh has one replica"),
        ("dualpipe", Mesh(2, 1, 2), False, "dualpipe holds two copies of every stage"),
    ],
)
def test_what_cannot_be_sharded_is_refused(schedule: str, mesh: Mesh, in_process: bool, message: str) -> None:
    program = schedc.compile(schedule, P=2, M=4)
    with pytest.raises(RuntimeFault, match=message):
        DenseSharding(program, mesh, [Coordinate(0, 0)], in_process)


def test_dense_parameters_of_several_types_are_refused() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(RuntimeFault, match="dense parameters of 2 types"):
        DenseShards.over(mixed, None, set())  # type: ignore[arg-type]


def test_a_pipeline_in_one_process_says_so() -> None:
    program = schedc.compile("1f1b", P=2, M=4)
    with pytest.raises(RuntimeFault, match="start one process per rank"):
        Pipeline(small_gpt(), program, loss_fn=next_token_loss, mesh=Mesh(2, 1, 2, shard_dense=True), in_process=True)
