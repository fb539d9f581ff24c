"""Experts that move between steps: training goes on as without, states keep their bits, and faults change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.moe.hot_cases import ROWS
from runtime.moe.rebalance_cases import OUT, PHASES, Case, built, placed, trained, update
from schedc_runtime.checkpoint.stored import whole_tensor
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.counts import ABSENT, DROPPED
from schedc_runtime.moe.placement import ExpertPlaces, PlacedNumbers, runs_of
from schedc_runtime.testing import pool
from schedc_runtime.trainers import checkpoint
from support.runtime_cases import tokens
from support.sweeps import in_sweeps, swept

NODE = "  topology nodes 1 x 4\n  overlap auto\n"
NODES = "  topology nodes 2 x 2\n  overlap auto\n"
CASES = [
    Case("1f1b", {"P": 1, "M": 2}, NODE),
    Case("zbh1", {"P": 1, "M": 2}, f"{NODES}  alltoall hierarchical\n"),
    Case("dualpipe", {"P": 2, "M": 4}, f"{NODES}  alltoall allgather\n"),
    Case("dualpipev", {"P": 1, "M": 2}, f"{NODE}  hot 1\n"),
    Case("1f1b", {"P": 1, "M": 2}, f"{NODE}  hot 1 by microbatch\n"),
    Case("1f1b", {"P": 1, "M": 2}, f"{NODE}  balance by microbatch within 1\n  products tiles\n"),
    Case("1f1b", {"P": 1, "M": 2}, f"{NODES}  balance by step over group\n  products tiles\n"),
    Case("1f1b", {"P": 1, "M": 2}, f"{NODES}  capacity 1.0\n  alltoall hierarchical\n"),
    Case("1f1b", {"P": 1, "M": 2}, f"{NODES}  sizes bounded 4\n  alltoall hierarchical\n"),
]


EXACT = (0, 1, 7, 8)
"""Cases with two choices of a token here: a sum of two has no order, so that moves change no bit."""


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("number", swept(range(len(CASES)), (1,)))
def test_training_goes_on(number: int) -> None:
    """Three steps with moves behind them give the losses and the state of three steps without."""
    case, most = (CASES[number]._replace(top=2), 0.0) if number in EXACT else (CASES[number], 1e-13)
    losses, state = trained(case, moving=False)
    other, moved = trained(case, moving=True)
    torch.testing.assert_close(torch.stack(other), torch.stack(losses), rtol=0, atol=most)
    assert state.keys() == moved.keys()
    for name, value in state.items():
        torch.testing.assert_close(moved[name], value, rtol=0, atol=most, msg=name)


@in_sweeps("test_training_goes_on", "test_faults")
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.processes
def test_processes() -> None:
    """Ranks in processes have the bits of ranks in one process, and the way there and back changes none."""
    cases = [Case("1f1b", {"P": 1, "M": 2}, f"{NODES}  alltoall hierarchical\n"), *swept(CASES[:1], [])]
    answers = pool(4).run("runtime.moe.rebalance_cases:processes", cases=cases, timeout=240)
    for everyone in zip(*answers, strict=True):
        assert [(wrong, back) for wrong, _, back, _ in everyone] == [([], True)] * 4
        # Experts 0, 7 and 4 of ranks 0, 3 and 2 go round; rank 1 has no part in it.
        assert [changed for _, changed, *_ in everyone] == [True, False, True, True]
        assert [sent > 0 for *_, sent in everyone] == [True, False, True, True]


@pytest.mark.slow
@pytest.mark.processes
def test_faults() -> None:
    """A fault of one rank leaves a layer where it was on all ranks, and layers before it where they shall be."""
    outcomes = pool(4).run("runtime.moe.rebalance_cases:faults", run=CASES[0], timeout=240)
    for everyone in zip(*outcomes, strict=True):
        phase, number, _, moved = everyone[0]
        assert phase in PHASES
        assert all("planted" in error for _, _, error, _ in everyone), everyone
        assert all("changed" not in error for _, _, error, _ in everyone), everyone
        assert all(each[3] == moved for each in everyone), everyone
        assert moved == [number == 2 and phase != "__init__", False]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(each) for name, each in checkpoint._kept(folder, None).tensors.items()}


@pytest.mark.slow
def test_checkpoints_show_no_placement(tmp_path: Path) -> None:
    """The tensors of a checkpoint are those of a run whose experts stay. Ranks with another placement load them."""
    kept = []
    for moving in (True, False):
        pipe, optimizer = built(CASES[0])
        update(pipe, optimizer, 0)
        if moving:
            pipe.rebalance(optimizer, placed(pipe, *OUT))
        checkpoint.save(tmp_path / str(moving), pipe, optimizer)
        kept.append(tensors_in(tmp_path / str(moving)))
        update(pipe, optimizer, 1)
        checkpoint.load(tmp_path / "True", pipe, optimizer)
        checkpoint.save(tmp_path / "again", pipe, optimizer)
        whole = {name: value / 2 for name, value in pipe.full_state_dict().items()}
        pipe.load_state_dict(whole)
        assert [name for name, value in pipe.full_state_dict().items() if not torch.equal(value, whole[name])] == []
        kept.append(tensors_in(tmp_path / "again"))
    assert len(kept[0]) > 20
    for other in kept[1:]:
        assert other.keys() == kept[0].keys()
        assert [name for name, value in kept[0].items() if not torch.equal(other[name], value)] == []


def test_numbers() -> None:
    """Choices follow the placement, and marks with them; counts come back in the order of experts."""
    placement = ExpertPlaces.home(4).swapped((0, 3))
    numbers = PlacedNumbers(placement)
    index = torch.tensor([[0, 1], [3, 4], [9, DROPPED], [ABSENT, ABSENT - 1 - 0], [ABSENT - 1 - 3, -9]])
    expected = [[3, 1], [0, 4], [4, DROPPED], [ABSENT, ABSENT - 1 - 3], [ABSENT - 1 - 0, ABSENT - 1 - 4]]
    assert numbers.of_choices(index).tolist() == expected
    assert numbers.of_experts(torch.tensor([10, 11, 12, 13])).tolist() == [13, 11, 12, 10]
    numbers.take(ExpertPlaces.home(4))
    assert numbers.of_choices(index[:1]).tolist() == [[0, 1]]
    assert [tuple(run) for run in runs_of((4, 5, 2, 3, 0))] == [(4, 0, 2), (2, 2, 2), (0, 4, 1)]


@pytest.mark.slow
def test_refused() -> None:
    """What cannot move is named, and nothing has changed."""
    with pytest.raises(RuntimeFault, match="no permutation"):
        ExpertPlaces((0, 0, 1))
    pipe, optimizer = built(CASES[0])
    wanted = placed(pipe, *OUT)
    update(pipe, optimizer, 0)
    parameter = next(p for name, p in pipe.named_parameters() if name.endswith("experts.down"))
    with pytest.raises(RuntimeFault, match="`nowhere`, which is no layer of experts"):
        pipe.rebalance(optimizer, {"nowhere": range(8)})
    with pytest.raises(RuntimeFault, match="a placement of 4 experts"):
        pipe.rebalance(optimizer, {name: range(4) for name in wanted})
    with pytest.raises(RuntimeFault, match="no optimizer here has"):
        pipe.rebalance(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), wanted)
    optimizer.state[parameter]["factored"] = torch.zeros(3)
    with pytest.raises(RuntimeFault, match=r"factored of AdamW` has the shape \[3\]"):
        pipe.rebalance(optimizer, wanted)
    optimizer.state[parameter]["factored"] = [1]
    with pytest.raises(RuntimeFault, match="factored of AdamW` is a list"):
        pipe.rebalance(optimizer, wanted)
    optimizer.state[parameter]["factored"] = 1.0
    with pytest.raises(RuntimeFault, match="differ in numbers in the states of optimizers"):
        pipe.rebalance(optimizer, wanted)
    del optimizer.state[parameter]["factored"]
    batch, targets = tokens(ROWS * pipe.program.microbatches * pipe.mesh.replicas)
    pipe.step(batch, targets, accumulate=2)
    with pytest.raises(RuntimeFault, match="1 of 2 calls have added their gradients"):
        pipe.rebalance(optimizer, wanted)
    pipe.zero_grad()
    pipe.rebalance(optimizer, wanted)
    pipe.close()
