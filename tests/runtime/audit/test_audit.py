"""An audit names the rank whose bits flip, is silent on healthy ranks, and leaves training as it was."""

from __future__ import annotations

import random
import re
from functools import partialmethod

import pytest
import torch
from torch import nn

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Audit, Mesh, Pipeline, WrongBits
from schedc_runtime.audit.choice import CaseTable
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.transport import in_process
from support.audit_cases import SETTINGS, FaultyStage, Flip, Setting, flip_bit, flips, watch_of
from support.sweeps import halved, swept

pytestmark = pytest.mark.slow

PLAIN, TWINS = SETTINGS[0], SETTINGS[2]


@pytest.mark.sweep
@pytest.mark.parametrize("setting", [TWINS, *swept([PLAIN, SETTINGS[4]], [])], ids=lambda each: each.schedule)
def test_flips_that_change_what_is_sent_are_named(setting, tmp_path):
    outcomes = flips(setting, 24, str(tmp_path))
    assert [outcome for outcome in outcomes if outcome.changed and not outcome.named] == []
    assert [outcome for outcome in outcomes if not outcome.changed and outcome.kind] == []
    assert sum(outcome.changed for outcome in outcomes) >= 12


@pytest.mark.sweep
@pytest.mark.parametrize("name", halved(["zbh1", "dualpipe", "dualpipev"]))
def test_an_audited_training_has_the_bits_of_another_one(name, tmp_path):
    def trained(audit: Audit | None) -> tuple[Pipeline, list[torch.Tensor]]:
        program = compile_schedule(name, P=2, M=4)
        torch.manual_seed(0)
        model = GPT(GPTConfig(width=16, heads=2, blocks=program.stages, vocab=32, dropout=0.1))
        batch, targets = torch.randint(0, 32, (4, 6)), torch.randint(0, 32, (4, 6))
        pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True, example=batch, audit=audit)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for _ in range(4 * program.stages):
            pipe.step(batch, targets)
            optimizer.step()
            optimizer.zero_grad()
        return pipe, list(pipe.parameters())

    audited, bits = trained(Audit(folder=tmp_path))
    watch = watch_of(audited)
    assert (watch.verdicts, watch.off) == ([], {})
    assert watch.proved == {"rank 0": audited.steps - 1, "rank 1": audited.steps}
    for one, other in zip(bits, trained(None)[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.sweep
@pytest.mark.parametrize("name", halved(["1f1b", "zbh1", "dualpipe", "zbv"]))
def test_gradients_of_weights_are_compared_where_they_are_one_microbatchs_own(name, tmp_path):
    pipe, batch, targets = Setting(name, 2, 4).pipeline(str(tmp_path))
    watch = watch_of(pipe)
    for number in range(8):
        pipe.step(batch, targets)
        pipe.zero_grad()
        case = watch.table.case(number)
        stage = pipe._assembly.stages[case.suspect][case.stage]
        told = {name for name in watch.trial.told["first"] if name.startswith("gradient of")}
        names = {f"gradient of `{name}`" for name, _ in stage.module.named_parameters()}
        assert told == (names if case.first else set())
        assert watch.proved[pipe.mesh.name(case.suspect)] == number + 1


def test_every_microbatch_and_every_first_weight_gradient_has_its_turn():
    program = compile_schedule("zbv", P=3, M=6)
    table = CaseTable(program, Mesh(3))
    cases = [table.case(number) for number in range(3 * 2 * 2 * 6)]
    turns = {(case.suspect.pipeline, case.stage, case.microbatch) for case in cases}
    assert turns == {(rank, stage, number) for rank in range(3) for stage in (rank, 5 - rank) for number in range(6)}
    assert [case.suspect.pipeline for case in cases[:4]] == [0, 1, 2, 0]
    assert all(case.defer and case.helpers[0].borrows for case in cases)


def test_who_holds_the_weights_repeats_before_who_borrows_them():
    program = compile_schedule("dualpipe", P=4, M=8)
    table = CaseTable(program, Mesh(4, data=2))
    helpers = table.case(0).helpers
    assert [helper.borrows for helper in helpers] == [False, False, True, True]
    assert {helper.place for helper in helpers[:2]} == {Coordinate(3, 0), Coordinate(0, 1)}
    turns = [table.case(8 * visit).helpers[0].place for visit in range(4)]
    assert set(turns) == {Coordinate(3, 0), Coordinate(0, 1)}


def test_the_error_says_who_when_and_what_to_do(tmp_path):
    pipe, batch, targets = PLAIN.pipeline(str(tmp_path))
    for _ in range(4):
        pipe.step(batch, targets)
        pipe.zero_grad()
    assert watch_of(pipe).proved == {f"rank {rank}": rank + 1 for rank in range(4)}
    case = watch_of(pipe).table.case(4)
    stage = pipe._assembly.stages[case.suspect][case.stage]
    calls = [list(each.code.calls) for each in executors(pipe)]
    with FaultyStage(stage, case.microbatch) as quiet:
        pipe.step(batch, targets)
    pipe.steps = 4
    last = quiet.counts["forward"] - 1
    with (
        FaultyStage(stage, case.microbatch, Flip("forward", last, 7, 30, False), quiet.counts),
        pytest.raises(WrongBits) as caught,
    ):
        pipe.step(batch, targets)
    text = str(caught.value)
    assert caught.value.ranks == ("rank 0",)
    assert caught.value.proved == 5
    assert pipe.steps == 4
    assert text.startswith("rank 0 computes wrongly now and then")
    assert re.search(r"step 5, stage 0, microbatch \d of rank 0, repeated by rank 1; differs: activation", text)
    assert "take rank 0 out of the job; zero the gradients, and go on from a state not newer than step 5" in text
    assert [list(each.code.calls) for each in executors(pipe)] == calls
    pipe.zero_grad()
    pipe.step(batch, targets)
    assert pipe.steps == 5


def executors(pipe):
    return [each for bound in pipe._bound_code._bound.values() for each in bound.executors.values()]


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 2), (2, 1), (1, 0)])
def test_a_message_that_changes_on_its_way_names_both_ends(sender, receiver, tmp_path, monkeypatch):
    pipe, batch, targets = PLAIN.pipeline(str(tmp_path))
    pipe.step(batch, targets)
    pipe.steps = 1  # rank 1 is audited
    copied, on_the_way = in_process._copied, []

    def posted(channel, post, *arguments):
        on_the_way[:] = [channel.source, channel.target]
        return post(channel, *arguments)

    def flipped(tensor):
        copy = copied(tensor)
        if on_the_way == [sender, receiver]:
            flip_bit(copy, 5, 20)
        return copy

    for end in ("send", "receive"):
        monkeypatch.setattr(in_process._Channel, end, partialmethod(posted, getattr(in_process._Channel, end)))
    monkeypatch.setattr(in_process, "_copied", flipped)
    with pytest.raises(WrongBits, match=f"the link from rank {sender} to rank {receiver} changes") as caught:
        pipe.step(batch, targets)
    assert caught.value.ranks == (f"rank {sender}", f"rank {receiver}")


def test_an_operation_that_does_not_repeat_itself_ends_the_audit_of_its_stage(tmp_path, capsys):
    program = compile_schedule("1f1b", P=2, M=2)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    batch = torch.randn(4, 8)
    pipe = Pipeline(
        model, program, loss_fn=nn.functional.mse_loss, in_process=True, example=batch, audit=Audit(folder=tmp_path)
    )
    stage = pipe._assembly.stages[Coordinate(0, 0)][0]
    watch = watch_of(pipe)
    noise = random.Random(0)
    stage.module.register_forward_hook(lambda module, args, output: (output[0] * (1 + noise.random()),))
    for _ in range(4):
        pipe.step(batch, torch.zeros(4, 8))
        pipe.zero_grad()
    assert list(watch.off) == [0]
    assert list(watch.proved) == ["rank 1"]
    assert "stage 0 is no longer audited: activation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "why"),
    [({"rng": "torch"}, "rng='torch' draws"), ({"mesh": Mesh(2, experts=2)}, "experts are shared"),
     ({"mesh": Mesh(2, data=2, shard_dense=True)}, "the dense parts are sharded")],
)  # fmt: skip
def test_pipelines_that_cannot_be_audited_are_refused(given, why):
    program = compile_schedule("1f1b", P=2, M=2)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with pytest.raises(RuntimeFault, match=f"cannot be audited: {why}"):
        Pipeline(
            model, program, loss_fn=nn.functional.mse_loss, in_process=True, example=torch.randn(8, 8), audit=Audit(),
            **given,
        )  # fmt: skip
    with pytest.raises(RuntimeFault, match="has nobody to repeat"):
        Pipeline(model, compile_schedule("1f1b", P=1, M=2), loss_fn=nn.functional.mse_loss, audit=Audit())


def small_moe(layers):
    routing = RouterConfig(8, 2, scores="sigmoid", scale=2.5, biased=True, bias_rate=0.01, balance=1e-4)
    return MoETransformer(
        MoEConfig(
            vocab=32, width=16, heads=2, dense_blocks=0, moe_blocks=layers, inner=32, expert_inner=8, shared=1,
            routing=routing, query_rank=8, key_value_rank=8, plain=8, rotary=4, value=8,
        )
    )  # fmt: skip


def test_stages_with_experts_are_repeated_by_who_holds_them_alone(tmp_path):
    batch, targets = torch.randint(0, 32, (4, 6)), torch.randint(0, 32, (4, 6))
    options = {"loss_fn": next_token_loss, "in_process": True, "example": batch, "audit": Audit(folder=tmp_path)}
    with pytest.raises(RuntimeFault, match="nobody can repeat its microbatches: it has experts"):
        Pipeline(small_moe(2), compile_schedule("1f1b", P=2, M=4), **options)
    pipe = Pipeline(small_moe(2), compile_schedule("dualpipe", P=2, M=4), **options)
    for _ in range(4):
        pipe.step(batch, targets)
        pipe.update_biases()
    assert watch_of(pipe).proved == {"rank 0": 3, "rank 1": 4}


@pytest.mark.parametrize("given", [{"every": 0}, {"on_fault": "panic"}])
def test_an_audit_refuses_what_it_cannot_do(given):
    with pytest.raises(RuntimeFault, match="every is at least 1"):
        Audit(**given)


def test_telling_goes_on(tmp_path, capsys):
    pipe, batch, targets = Setting("1f1b", 2, 2).pipeline(str(tmp_path))
    watch = Audit(folder=tmp_path, on_fault="tell").watch(pipe)
    case = watch.table.case(0)
    stage = pipe._assembly.stages[case.suspect][case.stage]
    with FaultyStage(stage, case.microbatch, Flip("weights", 1, 3, 30, True)):
        pipe.step(batch, targets)
    assert pipe.steps == 1
    assert [verdict.kind for verdict in watch.verdicts] == ["memory"]
    assert "schedc: the memory of rank 0 has changed by itself" in capsys.readouterr().err
