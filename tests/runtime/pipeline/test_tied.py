"""Tied weights of stages on different ranks: a copy each, one sum of gradients, and what would tear them apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.ir.ties import Tie
from schedc.step.program.tied import with_tied
from schedc_runtime import Pipeline
from schedc_runtime.errors import PartitionError, RuntimeFault
from schedc_runtime.models.gpt import GPT
from schedc_runtime.testing import pool
from support.runtime_cases import check_parity, differences, next_token_loss, oracle, small_gpt, tokens
from support.sweeps import halved, in_sweeps

FIRST, LAST = "token_embedding.weight", "head.weight"


def train(model: nn.Module, schedule: str = "1f1b", **sizes: int) -> Pipeline:
    program = schedc.compile(schedule, **{"P": 2, "M": 4, **sizes})
    return Pipeline(model, program, loss_fn=next_token_loss, in_process=True)


def copies(pipe: Pipeline) -> list[nn.Parameter]:
    return pipe._assembly.weights.parameters()


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "sizes", "stages"),
    halved([("1f1b", {"P": 4}, (0, 3)), ("zbh1", {"P": 3}, (0, 2)), ("interleaved_1f1b", {}, (0, 3))]),
)
def test_each_rank_has_a_copy_and_the_sum_of_all_uses(
    schedule: str, sizes: dict[str, int], stages: tuple[int, ...]
) -> None:
    model = small_gpt(tied=True)
    pipe = train(model, schedule, **sizes)
    table = model.token_embedding.weight
    assert pipe.program.tied == (Tie(stages, table.nbytes),)
    assert check_parity(pipe, model, 4) == sorted(dict(model.named_parameters()))
    first, last = copies(pipe)
    assert first is table is model.head.weight  # the model stays tied, and is trained
    assert last is not first
    assert torch.equal(first.grad, last.grad)


def recurrent(blocks: int = 8, every: int = 2) -> GPT:
    """A model whose blocks are the first ones again and again."""
    model = small_gpt(blocks)
    for index in range(every, blocks):
        model.blocks[index] = model.blocks[index % every]
    return model


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "ranks"), halved([("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipe", 2)])
)
def test_blocks_that_every_stage_uses(schedule: str, ranks: int) -> None:
    """Four ranks add up four gradients, which must come in one order everywhere."""
    pipe = train(recurrent(), schedule, P=ranks)
    batch, targets = tokens(8)
    loss = pipe.step(batch, targets)
    assert differences(pipe, loss, oracle(pipe, batch, targets)) == []
    twin = recurrent()
    next_token_loss(twin(batch), targets).backward()
    grads = {name: p.grad for name, p in twin.named_parameters(remove_duplicate=False)}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-9, atol=1e-13)


@pytest.mark.slow
def test_gradients_of_several_steps_add_up() -> None:
    """Each step adds the sum of its own uses once."""
    pipe = train(small_gpt(tied=True))
    batches = [tokens(4, seed=seed) for seed in range(3)]
    sums = [oracle(pipe, *batch).grads[FIRST] for batch in batches]
    for batch in batches:
        pipe.step(*batch)
    for copy in copies(pipe):
        assert torch.equal(copy.grad, sums[0] + sums[1] + sums[2])
    pipe.evaluate(*batches[0])
    assert all(torch.equal(copy.grad, sums[0] + sums[1] + sums[2]) for copy in copies(pipe))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_copies_without_gradients(frozen: bool) -> None:
    """What no copy has stays away; what one copy lacks counts as zeros."""
    model = small_gpt(tied=True)
    model.token_embedding.weight.requires_grad_(not frozen)
    if not frozen:
        model.head.forward = lambda x: x @ model.head.weight.detach().t()  # type: ignore[method-assign]
    pipe = train(model)
    pipe.step(*tokens(4))
    first, last = copies(pipe)
    if frozen:
        assert first.grad is None is last.grad
    else:
        assert first.grad.abs().sum() > 0
        assert torch.equal(first.grad, last.grad)


def test_state_dicts_have_all_names() -> None:
    model = small_gpt(tied=True)
    pipe = train(model)
    whole = pipe.full_state_dict()
    assert list(whole) == list(model.state_dict())
    assert whole[FIRST] is whole[LAST]
    ones = {name: torch.ones_like(value) for name, value in whole.items()}
    for left_out in ((), (FIRST,), (LAST,)):
        pipe.load_state_dict({name: value + len(left_out) for name, value in ones.items() if name not in left_out})
        assert all(bool((copy == 1 + len(left_out)).all()) for copy in copies(pipe))
    with pytest.raises(RuntimeFault, match=f"`{FIRST}` and `{LAST}` are one tied weight, and differ"):
        pipe.load_state_dict({**ones, LAST: 2 * ones[LAST]})
    with pytest.raises(RuntimeFault, match="missing"):
        pipe.load_state_dict({name: value for name, value in ones.items() if name not in (FIRST, LAST)})


@pytest.mark.slow
def test_a_norm_counts_one_copy() -> None:
    norms = set()
    for schedule in ("1f1b", "interleaved_1f1b", "zbv"):
        pipe = train(small_gpt(tied=True), schedule)
        pipe.step(*tokens(4))
        norms.add(float(pipe.clip_grad_norm_(1e-3)))
    model = small_gpt(tied=True)
    next_token_loss(model(tokens(4)[0]), tokens(4)[1]).backward()
    assert max(norms) - min(norms) < 1e-12
    assert max(norms) == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])), rel=1e-12)
    first, last = copies(train(small_gpt(tied=True)))
    assert torch.equal(first, last)


def groups(pipe: Pipeline, **other: Any) -> torch.optim.Optimizer:
    """An optimizer with the first copies in one group, and the last in one with ``other`` hyperparameters."""
    first, last = copies(pipe)
    return torch.optim.AdamW([{"params": [first]}, {"params": [last], **other}])


def unequal(pipe: Pipeline) -> None:
    with torch.no_grad():
        copies(pipe)[1].add_(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (unequal, "has other values on rank 0 than on rank 1"),
        (lambda pipe: copies(pipe)[1].requires_grad_(False), "is trained on rank 0 and frozen on rank 1"),
        (
            lambda pipe: groups(pipe, weight_decay=0.5),
            "is optimized with weight_decay 0.01 on rank 0 and 0.5 on rank 1",
        ),
        (
            lambda pipe: groups(pipe, betas=(0.5, 0.9)),
            r"is optimized with betas \[0.9, 0.999\] on rank 0 and \[0.5, 0.9\] on",
        ),
        (
            lambda pipe: torch.optim.SGD([copies(pipe)[0]], lr=0.1),
            "is in an optimizer on rank 0, and in none on rank 1",
        ),
        (lambda pipe: groups(pipe, group="head"), ""),
        (lambda pipe: [groups(pipe), torch.optim.SGD([copies(pipe)[0]], lr=0.1)], ""),  # which steps is unknown
        (lambda pipe: torch.optim.AdamW(pipe.parameters()), ""),
    ],
)
def test_what_would_tear_copies_apart_is_refused_before_a_step(change: Any, says: str) -> None:
    pipe = train(small_gpt(tied=True))
    kept = change(pipe)
    if not says:
        pipe.step(*tokens(4))
        return
    with pytest.raises(RuntimeFault, match=f"`{FIRST}` {says}"):
        pipe.step(*tokens(4))
    del kept


def hooked() -> GPT:
    model = small_gpt(tied=True)
    model.head.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    return model


class Across(nn.Module):
    """Four stages, of which the first two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("model", "schedule", "says"),
    [
        (
            Across(),
            "dualpipe",
            r"`blocks.0.weight` \(stage 0, ranks 0 and 3\) and `blocks.1.weight` .*two copies of each",
        ),
        (hooked(), "1f1b", "(?s)has a hook.*after `step`"),
    ],
)
def test_ties_that_cannot_be_summed_are_refused(model: nn.Module, schedule: str, says: str) -> None:
    with pytest.raises(PartitionError, match=says):
        train(model, schedule, P=4, M=8)


def test_a_program_for_other_ties_is_refused() -> None:
    program = with_tied(schedc.compile("1f1b", P=3, M=3), [Tie((0, 1), 8)])
    with pytest.raises(RuntimeFault, match=r"compiled for the tied stages \[\(0, 1\)\], .* ties \[\(0, 2\)\]"):
        Pipeline(small_gpt(tied=True), program, loss_fn=next_token_loss, in_process=True)
    folded = with_tied(schedc.compile("zbv", P=2, M=4), [Tie((0, 3))])  # both uses on one rank
    pipe = Pipeline(small_gpt(tied=True), folded, loss_fn=next_token_loss, in_process=True)
    assert (len(pipe.program.tied), copies(pipe)) == (1, [])
    right = with_tied(program, [Tie((0, 2), 8)])  # bytes are those of the model
    pipe = Pipeline(small_gpt(tied=True), right, loss_fn=next_token_loss, in_process=True)
    assert pipe.program.tied == (Tie((0, 2), copies(pipe)[0].nbytes),)


@in_sweeps("test_each_rank_has_a_copy_and_the_sum_of_all_uses", "runtime/parity/test_parity.py::test_processes")
@pytest.mark.processes
def test_tied_weights_on_processes() -> None:
    cases = [("zbh1", {"P": 2, "M": 2}), ("interleaved_1f1b", {"P": 2, "M": 2}), ("dualpipe", {"P": 2, "M": 4})]
    everyone = pool(2).run("support.runtime_cases:parity", cases=cases, tied=True)
    for names in zip(*everyone, strict=True):
        assert {name for rank in names for name in rank} >= {*dict(small_gpt(tied=True).named_parameters())}
    for errors in pool(2).run("runtime.pipeline.test_tied:torn_apart"):
        assert [error.splitlines()[0] for error in errors] == [
            f"the tied weight `{FIRST}` is trained on rank 0 and frozen on rank 1",
            f"the tied weight `{FIRST}` has other values on rank 0 than on rank 1",
            f"the tied weight `{FIRST}` was loaded on rank 0 and not on rank 1",
            f"the tied weight `{FIRST}` is optimized with lr 0.1 on rank 0 and 0.2 on rank 1",
        ]


def torn_apart(rank: int, world_size: int) -> list[str]:
    """The errors of pipelines whose ranks disagree about the tied weight, from building to the fourth step."""
    program = schedc.compile("1f1b", P=2, M=2)

    def failed(act: Any) -> str:
        try:
            act()
        except RuntimeFault as error:
            return str(error)
        return "nothing was refused"

    def built(model: GPT) -> Pipeline:
        return Pipeline(model, program, loss_fn=next_token_loss, timeout=30)

    frozen, changed = small_gpt(tied=True), small_gpt(tied=True)
    frozen.head.weight.requires_grad_(rank == 0)
    with torch.no_grad():
        changed.head.weight[0, 0] += rank
    errors = [failed(lambda: built(frozen)), failed(lambda: built(changed))]
    pipe = built(small_gpt(tied=True))
    for _ in range(2):
        pipe.step(*tokens(4))
    if rank == 0:
        pipe.load_state_dict(small_gpt(tied=True).state_dict())
    errors.append(failed(lambda: pipe.step(*tokens(4))))
    pipe.close()
    pipe = built(small_gpt(tied=True))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1 * (rank + 1))
    errors.append(failed(lambda: pipe.step(*tokens(4))))
    del optimizer
    pipe.close()
    return errors
