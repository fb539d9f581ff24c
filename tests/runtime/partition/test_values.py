"""Branches on the values of tensors between units are recorded where the values are known."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.errors import PartitionError
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.partition.boundary import KnownValues
from schedc_runtime.partition.values import facts_of
from schedc_runtime.pipeline.agree.batch import StepRequest, agree, signature_of

WIDTH = 4
ROWS, LENGTH = 4, 6
TOKENS = torch.arange(ROWS * LENGTH).remainder(7).reshape(ROWS, LENGTH)
TARGETS = torch.zeros(ROWS)


class Branching(nn.Module):
    """Adds what depends on values of its constants and its batch, between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None, how: str = "") -> Tensor:
        h = self.blocks[0](self.embed(x))
        steps = torch.zeros(3, dtype=torch.int64)
        before = steps + 1
        steps[1] = 5
        if int(steps.max()) == 5 and before.sum().item() == 3:  # known of each batch
            h = h * 2
        if mask is not None:
            h = h * 3 if mask.bool().all() else h * mask.unsqueeze(-1)
        if positions is not None:
            h = h * 5 if (positions.diff(dim=-1) == 1).all() else h + positions.unsqueeze(-1)
        if how == "buffer" and self.scale.sum() == 3:
            h = h + 1
        if how == "view":
            part = steps[steps.argmin()]
            part.add_(9)
            h = h * steps.max().item()
        if how == "check":
            torch._check_tensor_all(x < 8, lambda: f"a token is too large: {x.max()}")
        return self.blocks[1](h)


def pipeline(**batch: object) -> tuple[Pipeline, Branching]:
    model = Branching()
    whole = copy.deepcopy(model)
    program = schedc.compile("1f1b", P=2, M=2)
    return Pipeline(model, program, loss_fn=loss_fn, in_process=True, example={"x": TOKENS, **batch}), whole


def loss_fn(output: Tensor, _: Tensor) -> Tensor:
    return (output**2).mean()


def expected(whole: nn.Module, **batch: Tensor) -> Tensor:
    return torch.stack([loss_fn(whole(**part), TARGETS) for part in parts(batch)]).mean().detach()


def parts(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value.chunk(2)[part] for key, value in batch.items()} for part in range(2)]


@pytest.mark.slow
def test_a_branch_holds_for_batches_of_the_same_values_alone() -> None:
    pipe, whole = pipeline()
    ones, counting = torch.ones(ROWS, LENGTH, dtype=torch.int64), torch.arange(LENGTH).repeat(ROWS, 1)
    zeros = torch.zeros_like(ones)
    for batch in (
        {"mask": ones}, {"mask": zeros}, {"mask": ones.bool()}, {"mask": ones.double()},
        {"positions": counting}, {"positions": counting + 1}, {"positions": zeros}, {"mask": ones},
    ):  # fmt: skip
        fields = {"x": TOKENS, **batch}
        torch.testing.assert_close(pipe.step(fields, TARGETS), expected(whole, **fields), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(pipe.evaluate(fields, TARGETS), expected(whole, **fields), rtol=1e-6, atol=1e-7)
    padded = ones.clone()
    padded[0, 4:] = 0
    for batch in ({"mask": padded}, {"mask": ones * 2}, {"positions": counting.flip(1)}, {"positions": counting + 7}):
        with pytest.raises(PartitionError, match=r"takes a branch.* from the values of a tensor"):
            pipe.step({"x": TOKENS, **batch}, TARGETS)


def test_an_example_of_known_values_is_recorded_once() -> None:
    pipe, _ = pipeline(mask=torch.ones(ROWS, LENGTH))
    pipe.step({"x": TOKENS, "mask": torch.ones(ROWS, LENGTH)}, TARGETS)
    pipe.step({"x": torch.ones_like(TOKENS), "mask": torch.ones(ROWS, LENGTH)}, TARGETS)  # nothing asks for tokens
    assert len(pipe.partition.records._kept) == 1


def test_values_of_parameters_and_buffers_are_not_known() -> None:
    with pytest.raises(PartitionError, match=r"(?s)takes a branch.*self.scale.sum\(\) == 3"):
        pipeline(how="buffer")


def test_a_view_that_follows_from_values_is_refused() -> None:
    """A write to the view would also change the tensor that it was taken from."""
    with pytest.raises(PartitionError, match=r"(?s)from the values of a tensor.*steps\[steps.argmin\(\)\]"):
        pipeline(how="view")


def test_checks_of_values_run_with_each_microbatch() -> None:
    pipe, whole = pipeline(how="check")
    fields = {"x": TOKENS, "how": "check"}
    loss = pipe.step(fields, TARGETS)
    torch.testing.assert_close(loss, expected(whole, x=TOKENS), rtol=1e-6, atol=1e-7)
    wrong = TOKENS.clone()
    wrong[3, 0] = 8
    with pytest.raises(InstructionError, match=r"(?s)failed at .F1.*a token is too large: "):
        pipe.step({"x": wrong, "how": "check"}, TARGETS)


def test_facts_hold_for_parts_of_a_batch() -> None:
    count = torch.arange(4)
    rows = count.repeat(3, 1)
    pairs: list[tuple[Tensor, int | None]] = [
        (torch.ones(3), 0), (torch.zeros(2, 2).bool(), 0), (rows, 0), (rows + 1, 0), (rows + 2, 0), (count, 0),
        (count, None), (rows, 1), (torch.ones(2, 3, 4), 0), (torch.ones(()), 0), (torch.ones(2, device="meta"), 0),
    ]  # fmt: skip
    ones, counting = KnownValues(False, 1), KnownValues(True, 0)
    wanted = [ones, KnownValues(False, 0), counting, KnownValues(True, 1), None, None, counting, None, None, None, None]
    assert facts_of(pairs) == wanted
    assert torch.equal(counting.tensor(rows.shape, rows), rows)
    assert torch.equal(ones.tensor(rows.shape, rows.bool()), rows >= 0)


def test_a_fact_is_what_all_ranks_know() -> None:
    """Replicas bring batches of their own: one with padding makes the values unknown on all ranks."""
    signature = signature_of(TOKENS)
    call = {"call": "step"}
    one = StepRequest(signature, signature, True, True, call, facts=[[False, 1]])
    for others, known in (([[False, 1]], [False, 1]), ([None], None), (None, None), ([[True, 0]], None)):
        agreed = agree([one, one._replace(facts=others), StepRequest(None, None, False, False, call)], "abc", 2)
        assert agreed.signature.get("known") == known
