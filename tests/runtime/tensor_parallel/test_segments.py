"""Sequences in segments that carry keys and values, against each document alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from schedc_runtime.errors import RuntimeFault, StageError
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.pipeline.agree.sequences import cut_sequences, segmented_call, whole_sequences
from schedc_runtime.stage.carries import Carries
from schedc_runtime.testing import pool
from support.needs import needs
from support.sweeps import in_sweeps, swept

CASES = "support.segment_cases"


@pytest.mark.sweep
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_documents_in_segments_are_those_alone() -> None:
    """Whole and split backwards; random legal orders with one order of sums have the same bits."""
    orders = swept(20, 2)
    for cases in pool(2).run(f"{CASES}:sequences", timeout=240, names=["llama"], orders=orders):
        assert [case["orders"] for case in cases] == [1, 1, orders]
        assert all(case["error"] <= 1e-14 and case["equal"] for case in cases), cases


@in_sweeps(
    "test_documents_in_segments_are_those_alone",
    "runtime/tensor_parallel/test_tensor_parallel.py::test_levels_of_recomputation_have_the_same_bits",
)
@pytest.mark.sweep
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("name", "level"), [("mistral", "full"), *swept([("deepseek_v3", "layer")], [])])
def test_segments_are_recomputed_with_the_same_bits(name: str, level: str) -> None:
    """In the backward and in an R ahead of it: windows, and latents that are joined a second time."""
    for cases in pool(2).run(f"{CASES}:sequences", timeout=240, names=[name], orders=0, levels=[level]):
        assert [case["schedule"] for case in cases] == ["seq1f1b", "split", "ahead"]
        assert all(case["error"] <= 1e-14 and case["equal"] for case in cases), cases
        none, recomputed = cases[0]["held"]
        assert recomputed < (0.8 if level == "full" else 0.5) * none


@in_sweeps(
    "test_documents_in_segments_are_those_alone",
    "runtime/tensor_parallel/test_tensor_parallel.py::test_experts_are_shared_over_tensor_ranks",
)
@pytest.mark.sweep
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_segments_work_beside_tensor_and_expert_ranks() -> None:
    """Rows that enter a core are gathered again, and keys joined again."""
    schedules = swept(["seq1f1b", "split", "ahead"], ["split"])
    arguments = {"names": ["Mixtral"], "orders": 0, "tensor": 2, "levels": ["layer"], "schedules": schedules}
    for cases in pool(4).run(f"{CASES}:sequences", timeout=240, **arguments):
        assert [case["schedule"] for case in cases] == schedules
        assert all(case["error"] <= 1e-14 and case["equal"] for case in cases), cases


@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_outputs_of_segments_are_put_together() -> None:
    for told in pool(2).run(f"{CASES}:evaluated", timeout=240):
        assert all(abs(error) <= 1e-13 for error in told.values()), told


@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_what_segments_do_not_serve_is_refused() -> None:
    for told in pool(2).run(f"{CASES}:refusals", timeout=240):
        assert "sequences in 4 segments and compile=" in told["compile"]
        assert "sequences in 4 segments and graphs=" in told["graphs"]
        assert "sequences in 4 segments and `offload` in the plan" in told["offload"], told["offload"]
        assert "sequences in 4 segments and `slices` in the plan" in told["slices"], told["slices"]
        assert "shift=True" in told["shift"]
        assert "returned a mean" in told["mean"]
        assert "`position_ids`" in told["positions"]
        assert "`attention_mask`" in told["mask"]
        assert "6 tokens, which do not divide into 4 segments" in told["tokens"]
        assert "7 rows" in told["rows"]
        assert "a list of microbatches" in told["list"]
        assert "or without tokens" in told["numbers"]
        assert "`linear_attention`" in told["state"]
        assert "segment 1 of sequence 0 is forwarded, and 0 are there" in told["forward"], told["forward"]
        assert "backward of segment 0 of sequence 0 runs before that of segment 1" in told["backward"]


def test_segments_are_rows_behind_the_door() -> None:
    tokens = torch.arange(4 * 6).reshape(4, 6)
    batch = {"input_ids": tokens, "position_ids": tokens}
    cut, _ = segmented_call(batch, None, 4, 2)
    assert cut["input_ids"].tolist()[:4] == [[0, 1, 2], [6, 7, 8], [3, 4, 5], [9, 10, 11]]
    assert torch.equal(whole_sequences(cut["input_ids"], 2, 2, 3), tokens)
    with pytest.raises(RuntimeFault, match=r"an output \[8, 2\] of segments of 3 tokens"):
        whole_sequences({"pooled": torch.zeros(8, 2)}, 2, 2, 3)
    grids = cut_sequences({"position_ids": tokens.expand(3, 4, 6)}, 2, 2, {"position_ids": 1})
    assert grids["position_ids"][2].tolist() == cut["input_ids"].tolist()
    with pytest.raises(BatchRefused, match="no whole number of sequences"):
        segmented_call(batch, None, 3, 2)


def _run(carries: Carries, own: list[Tensor], number: int) -> Tensor:
    carries.begin(number)
    return carries.joined("keys", own[number], 1)


def test_gradients_go_to_earlier_segments_in_one_order() -> None:
    own = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    carries = Carries(0, 3)
    joined = [_run(carries, own, number) for number in range(3)]
    assert [each.shape[1] for each in joined] == [3, 6, 9]
    assert torch.equal(joined[2], torch.cat(own, 1))
    weights = [torch.randn_like(each) for each in joined]
    for number in reversed(range(3)):
        (joined[number] * weights[number]).sum().backward()
    last = weights[2]
    assert torch.equal(own[2].grad, last[:, 6:])
    assert torch.equal(own[1].grad, weights[1][:, 3:] + last[:, 3:6])
    assert torch.equal(own[0].grad, weights[0] + (last[:, :3] + weights[1][:, :3]))
    carries.end()


def test_what_waits_for_a_segment_is_no_end_of_a_step() -> None:
    own = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    carries = Carries(1, 2)
    _run(carries, own, 0)
    with pytest.raises(StageError, match=r"still holds keys and values of the sequences \[0\]"):
        carries.end()
    carries.reset()
    carries.end()
    with torch.no_grad():
        for number in range(2):
            _run(carries, own, number)
    carries.end()


def test_segments_out_of_order_are_refused() -> None:
    own = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    carries = Carries(0, 2)
    with pytest.raises(StageError, match="segment 1 of sequence 0 is forwarded, and 0 are there"):
        _run(carries, own, 1)
    carries.reset()
    joined = [_run(carries, own, number) for number in range(2)]
    with pytest.raises(StageError, match="backward of segment 0 of sequence 0 runs before that of segment 1"):
        joined[0].sum().backward()
