"""Context ranks that share each sequence, against each document alone. `benchmarks/tensor.py context` has more."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedc_runtime.errors import RanksDisagree, RuntimeFault
from schedc_runtime.partition.example import CONTEXT
from schedc_runtime.pipeline.agree.contents import GivenBatches, check_given
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.ranks.mesh import Coordinate, Mesh, PeerGroups
from schedc_runtime.tensor_parallel.context import GatherKeys, context_mask, open_attentions
from schedc_runtime.tensor_parallel.styles import Core, StyledModule
from schedc_runtime.testing import pool
from schedc_runtime.transport.collectives import SoloCommunicator
from support.needs import needs
from support.sweeps import in_sweeps, swept
from support.tensor_cases import family

CASES = "support.context_cases"


@pytest.mark.sweep
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_documents_over_context_ranks_are_those_alone() -> None:
    """Full attention, and windows shorter than documents; every order of a cell has the same bits."""
    both = (("qwen3", "1f1b_overlap", {}), ("mistral", "1f1b", {"sliding_window": 3}))
    for name, schedule, sizes in both[: swept(2, 1)]:
        given: dict[str, Any] = {"names": [name], "schedules": [schedule], "num_hidden_layers": 2, **sizes}
        for cases in pool(4).run(f"{CASES}:sequences", timeout=240, **given):
            assert len(cases) == 1
            assert all(case["error"] <= 1e-14 and case["equal"] for case in cases), cases


@in_sweeps("test_a_plan_spreads_attention_sequences_and_experts_over_the_same_ranks")
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_tensor_and_context_ranks_work_together() -> None:
    for cases in pool(4).run(
        f"{CASES}:sequences",
        timeout=240,
        names=["llama"],
        schedules=["1f1b"],
        pipeline=1,
        tensor=2,
        num_hidden_layers=2,
    ):
        assert all(case["error"] <= 1e-14 and case["equal"] for case in cases), cases


@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_a_plan_spreads_attention_sequences_and_experts_over_the_same_ranks() -> None:
    """tp 2 of attention, cp 2 and ep 4: each expert group spans the ranks of one sequence.

    The level `layer` holds own rows before each core, and the microbatch's ids and places. Keys are gathered again.
    """
    given = {"names": ["Mixtral"], "schedule": "zbh1", "layers": 2}
    lines = ["", "recompute layer", *swept(["slices 2 of tokens"], [])]
    for cases in pool(4).run(f"{CASES}:planned", timeout=240, lines=lines, **given):
        assert {case["mesh"] for case in cases} == {repr(Mesh(1, 4, tensor=2, context=2))}
        assert all(case["error"] <= 1e-14 and case["equal"] for case in cases), cases
        plain, layer = cases[:2]
        assert layer["held"] < 0.17 * plain["held"]


@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_a_plan_without_tensor_ranks_shares_sequences_and_experts() -> None:
    """cp 2 and ep 4: two groups of context ranks have other rows, in one width."""
    given = {"names": ["Qwen3Moe"], "schedule": "zbh1", "layers": 1, "parallel": "cp 2 ep 4 dp 2"}
    for (case,) in pool(4).run(f"{CASES}:planned", timeout=240, lines=["recompute full"], **given):
        assert case["mesh"] == repr(Mesh(1, 4, context=2))
        assert case["error"] <= 1e-14, case
        assert case["equal"]


@in_sweeps("test_documents_over_context_ranks_are_those_alone")
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_compiled_units_offload_and_the_meta_device_work_beside_context_ranks() -> None:
    everyone = pool(4).run(f"{CASES}:beside", timeout=240, name="llama")
    moving = {case["way"] for cases in everyone for case in cases if case["moves"]}
    assert moving == {"offload"}
    for cases in everyone:
        assert [case["way"] for case in cases] == ["compile=", "offload", "meta device"]
        assert all(case["error"] <= 1e-14 and case["equal"] for case in cases), cases


@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_what_context_ranks_do_not_serve_is_refused_on_every_rank() -> None:
    for told in pool(4).run(f"{CASES}:refusals", timeout=240):
        assert "2 context ranks and `fully_shard`" in told["sharded"]
        assert "2 context ranks and graphs=" in told["graphs"]
        assert "2 context ranks and an auxiliary loss of experts" in told["auxiliary"]
        assert "2 context ranks and rng='torch'" in told["rng"]
        assert "shift=True" in told["shift"]
        assert "returned a mean" in told["mean"]
        assert "`flash_attention_2`" in told["flash"]
        assert "context_places of step 2 has other values on" in told["differ"], told["differ"]
        assert "given a different batch" in told["widths"]
        assert "`width=` of `context_rows`" in told["widths"]
        assert "no `context_places` comes to LlamaAttention" in told["places"]
        assert "no `context_places` comes to NemotronAttention" in told["dropped"]


def test_places_of_a_list_of_microbatches_are_compared_too() -> None:
    told = []
    for rank in range(2):
        batches = GivenBatches(later=False, context=2)
        batches.begin("step 1", [{CONTEXT: torch.zeros(1)}, {CONTEXT: torch.full((1,), rank)}], None)
        told.append((f"replica {rank}", rank, batches.told()))
    with pytest.raises(RanksDisagree, match=r"context_places of batch\[1\] of step 1 has other values on") as fault:
        check_given(told, 2)
    assert "context_rows" in fault.value.help


@in_sweeps(
    "runtime/tensor_parallel/test_tensor_parallel.py::test_a_state_is_the_same_at_other_numbers_of_tensor_ranks",
    "runtime/tensor_parallel/test_tensor_parallel.py::test_each_tensor_rank_writes_its_trace",
)
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_states_of_context_ranks_are_kept_and_their_steps_traced(tmp_path: Path) -> None:
    first, second, written = pool(4).run(f"{CASES}:kept_states", timeout=240, folder=str(tmp_path))[0]
    assert len(first) > 20
    assert second == first
    assert written["traces"].startswith("rank-0000")


@needs("transformers")
@pytest.mark.parametrize("other", ["config", "is_causal"])
def test_attentions_of_a_config_of_their_own_or_both_ways_are_refused(other: str) -> None:
    """Masks are then of a kind that places do not give, which the model's config does not say."""
    model: Any = family("llama")
    attention = model.model.layers[1].self_attn
    setattr(attention, other, deepcopy(model.config) if other == "config" else False)
    paths = [f"model.layers.{layer}.self_attn" for layer in range(len(model.model.layers))]
    cores = [Core(path, (), StyledModule(f"{path}.o_proj", attention.o_proj, "rowwise")) for path in paths]
    alone = SoloCommunicator("context")
    with pytest.raises(RuntimeFault, match="not every layer"):
        open_attentions(model, cores, ExpertGroup(alone, alone, alone, per_node=1, rank=0))


def test_a_token_attends_to_earlier_ones_of_its_document() -> None:
    """Two ranks with tokens 0, 3 and 1, 2 of a row whose last token is a document of its own; one is filled up."""
    begins, places = [[0, 3, -1, 0, 0, -1], [0, 3, -1, 1, 2, -1]]
    where = torch.tensor([[begins, places]])
    mask = context_mask(where, slice(3, 6))
    assert mask.shape == (1, 1, 3, 6)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 1, 0, 0], [1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 1]]
    assert context_mask(where, slice(3, 6), 2)[0, 0, 1].int().tolist() == [0, 0, 0, 1, 1, 0]


def test_context_ranks_are_neighbouring_replicas() -> None:
    mesh = Mesh(2, data=4, tensor=2, context=2)
    assert mesh.sharing_sequences(Coordinate(1, 3, 1)) == [8 + 2 * 2 + 1, 8 + 3 * 2 + 1]
    for wrong, words in (
        ({"data": 3, "context": 2}, "context ranks among"), ({"context": 0}, "context ranks among"),
        ({"data": 2, "experts": 3, "context": 2}, "3 ranks share the experts, 2 share sequences, and neither divides"),
    ):  # fmt: skip
        with pytest.raises(RuntimeFault, match=words):
            Mesh(2, **wrong)


@pytest.mark.parametrize(("nodes", "near", "lane"), [(1, 4, "node"), (2, 4, "node"), (2, 2, "rail"), (4, 1, "rail")])
def test_keys_take_the_links_between_nodes_that_they_cross(nodes: int, near: int, lane: str) -> None:
    """Two tensor ranks times two context ranks. near: processes of a node."""
    pair: Any = SimpleNamespace(size=2, rank=1)
    experts = replace(ExpertGroup.solo(), nodes=nodes, per_node=near)
    group = PeerGroups(experts, {"tensor": pair, "context": pair}).context
    assert (group.size, group.rank, GatherKeys(group, print, boolean=True).lane) == (2, 1, lane)
