"""A rank that fails, hangs, stops or dies: what every rank reports, how soon, and what can go on."""

from __future__ import annotations

import re

import pytest

from schedc_runtime.testing import RankError, pool
from support.sweeps import halved, swept


@pytest.mark.processes
def test_bad_batches_are_refused_alike_on_every_rank() -> None:
    first, second = pool(2).run("runtime.ranks.fault_cases:refusals")
    assert first == second
    told = [
        "batch has 7 rows (int64[7, 6]), which do not divide into 4 microbatches",
        "rank 0 and rank 1 were given a different batch: int64[4, 6] and int64[8, 6]",
        "rank 1 holds the last stage and was given no targets",
        "batch (int64[8, 6]) and targets (int64[4, 6]) differ in their first dimension",
        "batch[1] is a object: only tensors and plain values",
        "the batch brings 3 positional arguments",
        "rank 0 calls evaluate(scale=1.0, steps=6), rank 1 calls step(scale=1.0, steps=6)",
    ]
    for (kind, text), expected in zip(first, told, strict=True):
        assert kind in ("BatchRefused", "PartitionError")
        assert text.startswith(expected)


@pytest.mark.processes
def test_copies_of_a_stage_must_begin_equal() -> None:
    answers = pool(2).run("runtime.ranks.fault_cases:different_models")
    told = (f"rank 0 and rank 1 differ in their {what} of stage 0" for what in ("weights", "frozen parameters"))
    assert answers == [[*told, "built"]] * 2


@pytest.mark.processes
def test_a_device_that_the_group_cannot_send_from_is_refused() -> None:
    for kind, text in pool(2).run("runtime.ranks.fault_cases:other_device"):
        assert kind == "RuntimeFault"
        assert text.startswith("the model lies on cuda:0, and the process group (cpu:gloo,cuda:gloo) cannot send")


@pytest.mark.processes
@pytest.mark.sweep
@pytest.mark.parametrize("ranks", swept([2, 4], [2]))
def test_sizes_may_change_between_steps(ranks: int) -> None:
    assert pool(ranks).run("runtime.ranks.fault_cases:changing_sizes") == [[]] * ranks


@pytest.mark.processes
def test_an_exception_is_reported_by_the_others_as_its_cause() -> None:
    (other, seconds, after), (own, _, _) = pool(2).run("runtime.ranks.fault_cases:failing", fault="raise", timeout=50.0)
    assert own[0] == "InstructionError"
    assert own[1].startswith("rank 1 failed at 1F2\n  --> 1f1b.sched:")
    assert own[1].endswith("ZeroDivisionError: injected")
    assert other[0] == "PeerFailure"
    assert own[1] in other[1]
    assert seconds < 12.5, "the other rank must not wait for its timeout"
    assert after[0] == "PipelineBroken"


@pytest.mark.processes
def test_a_wrong_shape_is_found_before_it_is_sent() -> None:
    (own, _, _), (other, _, _) = pool(2).run("runtime.ranks.fault_cases:failing", fault="shape", timeout=20.0)
    assert own[0] == "InstructionError"
    assert "tensor 0 to send is float64[2, 3, 16], but the boundary says float64[2, 6, 16]" in own[1]
    assert "0SEND_F2" in own[1]
    assert other[0] == "PeerFailure"
    assert "float64[2, 3, 16]" in other[1]


@pytest.mark.processes
def test_a_hung_rank_is_named_with_what_each_rank_waits_on() -> None:
    (other, seconds, _), (own, _, _) = pool(2).run("runtime.ranks.fault_cases:failing", fault="sleep")
    assert other[0] == "StepTimeout"
    first, stack, *_ = other[1].splitlines()
    assert re.match(r"rank 1 \(pid \d+\) hangs in Python, for [\d.]+ s; it is in step 1 at 1F2 --> 1f1b.sched:", first)
    assert re.search(r"fault_cases.py\", line \d+ in _sleep$", stack), "the code that hangs"
    assert "\n  rank 0 waits for it at 0WAIT_" in other[1]
    assert "\n  rank 0 is in step 1 at 0WAIT_" in other[1]
    assert "\n  rank 1 is in step 1 at 1F2 --> 1f1b.sched:" in other[1]
    assert seconds >= 2, "the report comes while the other rank still hangs, which else ends after the pool's patience"
    assert own[0] in ("StepTimeout", "PeerFailure")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "does"), [("hold", r"holds Python's lock \(GIL\) in one call"), ("spin", "computes|waits for a free")]
)
def test_what_a_rank_does_that_all_wait_for_is_seen_from_outside(fault: str, does: str) -> None:
    (other, _, _), _ = pool(2).run("runtime.ranks.fault_cases:failing", fault=fault)
    first, stack, *_ = other[1].splitlines()
    assert re.match(rf"rank 1 \(pid \d+\) ({does}).*, for [\d.]+ s; it is in step 1 at 1F2 --> ", first), other[1]
    assert re.search(rf"in _{fault}$", stack), other[1]


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_waits_no_longer_than_steps_have_taught_it() -> None:
    """Three steps teach the limit of the fourth. A program that has not run has the whole limit."""
    (limits, (kind, text), seconds), _ = pool(2).run("runtime.ranks.fault_cases:learning")
    before, learnt, evaluation = limits
    assert before == evaluation == 60
    assert 1 <= learnt < 60
    assert kind == "StepTimeout"
    assert seconds >= 2, "20 times 0.1 s; without the learnt limit the pool would lose its patience"
    assert "a wait in this step may take 2 s: 20 times the longest step so far, 0.10 s" in text


@pytest.mark.processes
@pytest.mark.slow
def test_a_message_that_does_not_arrive_is_its_links() -> None:
    answers = pool(2).run("runtime.ranks.fault_cases:silent_link")
    first = [text.splitlines()[0] for _, text in answers]
    assert all(text.startswith("the link from rank 1 to rank 0 is silent: both ends have posted") for text in first)
    assert answers[0][0] == "StepTimeout"


@pytest.mark.processes
def test_a_stopped_rank_is_named() -> None:
    (other, _, _), _ = pool(2).run("runtime.ranks.fault_cases:failing", fault="stop")
    assert other[0] == "StepTimeout"
    assert re.search(r"^rank 1 \(pid \d+\) is stopped by a signal .*; it is in step 1 at 1F2 --> ", other[1]), other[1]
    assert other[1].count("where every rank stands:") == 1


@pytest.mark.processes
def test_a_rank_that_dies_is_named() -> None:
    alive, dead = pool(2).outcomes("runtime.ranks.fault_cases:failing", fault="kill")
    assert isinstance(dead, RankError)
    assert dead.kind == "died"
    found, seconds, _ = alive
    assert found[0] == "PeerFailure"
    assert re.search(r"^rank 1 \(pid \d+\) is dead: .*; it was in step 1 at 1F2 --> 1f1b.sched:", found[1]), found[1]
    assert seconds < 5


@pytest.mark.processes
def test_a_short_pause_changes_nothing() -> None:
    assert pool(2).run("runtime.ranks.fault_cases:pause") == [[], []]


@pytest.mark.processes
def test_a_rank_that_never_comes_is_named() -> None:
    (kind, text), _ = pool(2).run("runtime.ranks.fault_cases:absent")
    assert kind == "StepTimeout"
    assert re.match(
        r"rank 1 \(pid \d+\) has not come: it runs data, optimizer or other code of the trainer, for ", text
    )
    assert "\nrank 1 did not come to the start of step 1 within 1 s" in text
    assert "\n  rank 1 is between steps, before the first" in text


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(("block", "call", "stage"), halved([(1, 2, 1), (3, 1, 3)]))
def test_nan_is_traced_to_its_microbatch_and_stage(block: int, call: int, stage: int) -> None:
    answers = pool(4).run("runtime.ranks.fault_cases:not_finite", block=block, call=call)
    assert answers == [answers[0]] * 4
    (kind, microbatch, found_stage, text), wrong = answers[0]
    assert (kind, microbatch, found_stage) == ("NonFiniteLoss", call, stage)
    assert f"stage {stage} was the first to produce a value that is not finite, for microbatch {call}" in text
    assert wrong == []


@pytest.mark.processes
def test_a_bad_gradient_is_refused_on_all_ranks() -> None:
    answers = pool(4).run("runtime.ranks.fault_cases:bad_gradient")
    assert answers == [answers[0]] * 4
    (kind, stage, names, text), wrong = answers[0]
    assert (kind, stage, names) == ("NonFiniteGradients", 2, ["blocks.2.mlp.up.weight"])
    assert text.startswith("a gradient is NaN or infinite: that of `blocks.2.mlp.up.weight`, stage 2, on rank 2\n")
    assert "  made at one of " in text
    assert wrong == []


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("schedule", halved(["1f1b", "dualpipe"]))
def test_the_whole_state_is_gathered_under_the_models_names(schedule: str) -> None:
    first, second = pool(2).run("runtime.ranks.fault_cases:whole_state", schedule=schedule)
    assert (first[0], second[0]) == (53, 0)
    assert first[1:] == second[1:]
    assert first[1] < first[2]
