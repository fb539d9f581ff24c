"""Tensor parallelism on real ranks, against plain autograd. `benchmarks/tensor.py` has all families and schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedc_runtime.testing import pool
from support.needs import needs
from support.sweeps import in_sweeps, swept

CASES, EXPERT_CASES, RUN_CASES, LEVEL_CASES = (
    f"support.tensor_{kind}cases" for kind in ("", "expert_", "run_", "level_")
)
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return pool(4).run(f"{CASES}:toys", timeout=240)


@pytest.mark.parametrize("case", ["zbh1", "1f1b tied", "dualpipev tied", "dualpipe", "zbh1 tied on 2 replicas"])
def test_gradients_add_up_over_steps_as_in_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    """Weights with biases, norms and tables, also one that the embedding and the head share."""
    assert max(rank[case][figure] for rank in ranks for figure in ("error", "loss", "norm")) <= 1e-14


def test_partial_sums_travel_once_a_step_and_no_weight_gradient_waits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for case in rank.values():
            assert case["in W"] == 0
            assert case["sums"][0] == case["sums"][1] <= 2 * 2, "a scatter and a spread of each stage"


def test_tensor_ranks_with_other_batches_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        refused = rank["zbh1 tied on 2 replicas"]["refused"]
        assert "has other values on" in refused, refused
        assert "tensor rank 1" in refused


def test_our_own_models_train_by_their_own_styles() -> None:
    """Latent attention and a dense MLP are split, experts and the shared one whole; a fused product lies by heads."""
    for errors in pool(4).run(f"{RUN_CASES}:own_models", timeout=240):
        assert max(errors["transformer"]) <= 1e-14
        assert max(errors["GPT"]) <= 1e-14
        assert max(errors["GPT tied"]) <= 1e-14


@in_sweeps("runtime/tensor_parallel/test_ranks_as_threads.py::test_models_of_transformers")
@pytest.mark.sweep
@needs("transformers")
def test_models_of_transformers_train_by_their_own_plans() -> None:
    """Biases behind the sum, gathered columns in a core, norms of heads: every order of a cell has the same bits."""
    for name, schedule, layers in (("phi3", "zbh1", 2), ("starcoder2", "dualpipev", 4))[: swept(2, 1)]:
        sizes: dict[str, Any] = {"names": [name], "schedules": [schedule], "num_hidden_layers": layers}
        for (case,) in pool(4).run(f"{CASES}:families", timeout=240, **sizes):
            assert case["error"] <= 1e-14, case
            assert case["equal"], case


@needs("transformers")
@pytest.mark.parametrize(
    ("family", "schedules", "slices"),
    [
        ("olmo2", swept(["zbh1", "dualpipev"], ["zbh1"]), [3, 2]),
        *swept([("cohere2", ["interleaved_overlap"], [2, 3, 1, 4])], []),
    ],
)
def test_tokens_of_one_row_run_in_slices(family: str, schedules: list[str], slices: list[int]) -> None:
    """Norms behind cores, and cores side by side; slices of different lengths, and other numbers by stage."""
    arguments = {"names": [family], "schedules": schedules, "token_slices": slices}
    for case in pool(4).run(f"{CASES}:families", timeout=240, **arguments)[0]:
        assert case["error"] <= 1e-14, case
        assert case["equal"], case


@pytest.mark.sweep
@needs("transformers")
@pytest.mark.parametrize(
    ("family", "mesh", "biases"),
    [
        *swept([("Mixtral", "ep 2 over tp 2", 0)], []),
        *swept([("Qwen3Moe", "ep 4 over tp 2, dp 2", 0)], []),
        ("DeepseekV3", "ep 2 in tp 4", swept(3, 2)),
    ],
)
def test_experts_are_shared_over_tensor_ranks(family: str, mesh: str, biases: int) -> None:
    """Latent attention, an auxiliary loss, and groups larger and smaller than those of tensor ranks."""
    sizes: dict[str, Any] = {"names": [family], "meshes": [mesh], "balance": 0.01, "num_hidden_layers": 2}
    for (case,) in pool(4).run(f"{EXPERT_CASES}:experts", timeout=240, **sizes):
        assert case["error"] <= 1e-14, case
        assert (case["equal"], case["biases"]) == (True, biases)


@pytest.mark.sweep
@needs("transformers")
@pytest.mark.parametrize(
    ("schedule", "levels", "slices", "of_tokens", "share"),
    [
        *swept([("dualpipev", ["none", "layer"], 2, False, 0.15), ("zbh1", ["none", "layer"], 2, True, 0.15)], []),
        ("ahead", ["full", "layer 1 full 1", "layer"], 1, False, 0.35),
    ],
)
def test_levels_of_recomputation_have_the_same_bits(
    schedule: str, levels: list[str], slices: int, of_tokens: bool, share: float
) -> None:
    """What enters a core is gathered a second time at `layer`, in each order of a cell, in slices and in an R."""
    arguments: dict[str, Any] = {"name": "llama", "schedules": [schedule], "levels": levels, "slices": slices}
    arguments["of_tokens"] = of_tokens
    for (case,) in pool(4).run(f"{LEVEL_CASES}:levels", timeout=240, **arguments):
        assert case["error"] <= 1e-14, case
        assert case["equal"], case["bits"]
        held = [case["held"][level] for level in levels]
        assert held == sorted(held, reverse=True)
        assert held[-1] <= share * held[0], held
        assert sum(held) / len(held) == pytest.approx((held[0] + held[-1]) / 2, rel=0.05), "half of each"


@in_sweeps(
    "test_levels_of_recomputation_have_the_same_bits",
    "runtime/recompute/test_recompute_adaptive.py::test_adaptive_recomputes_while_routing_is_skewed",
)
@pytest.mark.sweep
@needs("transformers")
def test_levels_of_layers_and_of_rows_have_the_same_bits() -> None:
    """Two expert groups in one of tensor ranks, which decide differently."""
    levels = ["layer 1 medium 1", "layer adaptive 1.6 group", "medium adaptive 1.3 rank"]
    one, *deciding = levels[: swept(3, 2)]
    arguments = {"name": "Mixtral", "schedules": ["zbh1"], "levels": ["none", one, *deciding], "mesh": "ep 2 in tp 4"}
    cases = [case for (case,) in pool(4).run(f"{LEVEL_CASES}:levels", timeout=240, **arguments)]
    for case in cases:
        assert case["error"] <= 1e-14, case
        assert case["equal"], case["bits"]
        assert case["held"][one] < 0.7 * case["held"]["none"]
    for level in deciding:
        recomputed, kept = zip(*(case["again"][level] for case in cases), strict=True)
        assert min(recomputed) >= 16, "the first step recomputes everything"
        assert len(set(kept)) > 1, level


@in_sweeps("test_a_state_is_the_same_at_other_numbers_of_tensor_ranks")
@needs("transformers")
def test_a_state_with_experts_is_the_same_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    first, *others = pool(4).run(f"{EXPERT_CASES}:expert_states", timeout=240, folder=str(tmp_path / "saved"))[0]
    assert sum("experts." in name for name in first) == 4
    assert others == [first, first]


@needs("transformers")
def test_plans_for_experts_that_are_not_carried_out_on_tensor_ranks() -> None:
    for split, capacity, hot in pool(4).run(f"{EXPERT_CASES}:expert_refusals", timeout=240):
        assert "2 tensor ranks and experts, which `parallel` splits without `of attention`" in split
        assert "2 tensor ranks and `capacity` in the plan" in capacity
        assert "2 tensor ranks and `hot` in the plan" in hot


@in_sweeps("test_a_state_is_the_same_at_other_numbers_of_tensor_ranks")
def test_states_of_a_run_are_those_of_other_numbers_of_tensor_ranks(tmp_path: Path) -> None:
    """What `Checkpoints` keeps at 2 tensor ranks is the same bits at 1 and 4, and the next loss is the same."""
    first, *others = pool(4).run(f"{RUN_CASES}:kept_states", timeout=240, folder=str(tmp_path))[0]
    assert len(first) > 20
    assert others == [first, first]


@in_sweeps(
    "test_gradients_add_up_over_steps_as_in_one_process",
    "runtime/pipeline/test_materialize.py::test_values_do_not_depend_on_ranks_or_schedule",
)
def test_parts_of_a_model_on_the_meta_device_are_those_of_the_whole() -> None:
    """Rows, columns, biases, table and head: made by a seed at 1 and 2 tensor ranks, and read from whole tensors."""
    ranks = pool(4).run(f"{RUN_CASES}:materialized", timeout=240)
    assert max(rank[figure] for rank in ranks for figure in ("error", "loss")) <= 1e-14
    first, *others = [*ranks[0]["made"], *ranks[0]["read"]]
    assert len(first) > 20
    assert others == [first] * 3


def test_each_tensor_rank_writes_its_trace(tmp_path: Path) -> None:
    written = pool(4).run(f"{RUN_CASES}:traces", timeout=240, folder=str(tmp_path))
    places = [f"tensor-000{t}/rank-000{r}-step-00000001.json" for r in range(2) for t in range(2)]
    assert written == [[place] for place in places]
    events = json.loads((tmp_path / places[0]).read_text())["traceEvents"]
    assert any("gather" in event["name"] for event in events)


@in_sweeps(
    "test_gradients_add_up_over_steps_as_in_one_process",
    "runtime/compiled/test_units.py::test_every_schedule_has_the_bits_of_one_rank",
)
@needs("transformers")
def test_cores_are_compiled() -> None:
    """Attention and MLP of the layer of a stage, without a warning."""
    for case in pool(2).run(f"{RUN_CASES}:compiled", timeout=240, name="llama"):
        assert case["error"] <= 1e-14, case
        assert (case["equal"], case["compiled"], case["said"]) == (True, 2, [])


def test_a_state_is_the_same_at_other_numbers_of_tensor_ranks(tmp_path: Path) -> None:
    states = pool(4).run(f"{CASES}:states", timeout=240, folder=str(tmp_path / "saved"))[0]
    assert len(states) == 3
    first, *others = states.values()
    assert len(first) > 20
    assert all(other == first for other in others)
