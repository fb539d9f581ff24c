"""What ranks must have alike at a step: a rank that changes it alone is named on all ranks, before any message."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import schedc
from runtime.pipeline.step_facts_cases import WIDTH, Model
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.errors import RanksDisagree
from schedc_runtime.pipeline.agree.step_facts import StageFacts, check_facts, differing
from schedc_runtime.testing import pool

SAYS = {
    "frozen": "the parameter `layers.1.router.weight` is frozen on {odd}, and trained on {other}",
    "eval": "the model `Model` is in evaluation mode on {odd}, and in training mode on rank 0 of replica 0",
    "train": "its stages of `Model` are in evaluation mode on {odd}, and in training mode on rank 0 of replica 0",
    "one module": "the module `layers.1` is in evaluation mode on {odd}, and in training mode on {other} (",
    "autocast": "autocast is bfloat16 on cpu on {odd}, and off on rank 0 of replica 0",
    "no_grad": "gradients are off on {odd}, and on on rank 0 of replica 0",
    "update_biases": "the biases of `layers.1` were updated 7 times on {odd}, and 6 times on {other}",
    "reads": "`factor`, which the model's forward reads between its units, is 2.0 on {odd}, and as it was recorded on",
}


@pytest.mark.processes
def test_what_one_rank_changes_alone_is_refused_on_all_ranks() -> None:
    everyone = pool(4).run("runtime.pipeline.step_facts_cases:alone", odd=3, timeout=60)
    names = {"odd": "rank 1 of replica 1", "other": "rank 1 of replica 0"}
    assert everyone == [everyone[0]] * 4
    for change, (kind, text) in everyone[0].items():
        assert kind == "RanksDisagree", text
        assert text.startswith(SAYS[change].format(**names)), text
        assert "\n  = help: " in text
    assert everyone[0].keys() == SAYS.keys()


@pytest.mark.processes
def test_an_update_of_biases_alone_is_refused_without_a_timeout() -> None:
    everyone = pool(4).run("runtime.pipeline.step_facts_cases:update_alone", odd=2, timeout=60)
    kind, text, when = everyone[0]
    assert everyone == [everyone[0]] * 4
    assert (kind, when) == ("BatchRefused", "soon")
    assert "rank 0 of replica 0 calls step(scale=1.0), " in text
    assert "calls update_biases()" in text


def replicas_here() -> Pipeline:
    program, loss_fn = schedc.compile("1f1b", P=2, M=2), nn.functional.mse_loss
    example, mesh = torch.ones(2, WIDTH), Mesh(2, data=2)
    return Pipeline(Model(), program, loss_fn=loss_fn, mesh=mesh, in_process=True, example=example)


def test_copies_in_one_process_are_compared_as_well() -> None:
    pipe = replicas_here()
    last = pipe.held(pipe.places[-1])[0].module
    next(last.parameters()).requires_grad_(False)
    with pytest.raises(RanksDisagree, match=r"`layers\..*` is frozen on rank 1 of replica 1, and trained on rank 1"):
        pipe.step(torch.ones(8, WIDTH), torch.zeros(8, WIDTH))
    next(last.parameters()).requires_grad_(True)
    pipe.step(torch.ones(8, WIDTH), torch.zeros(8, WIDTH))


def test_a_digest_is_computed_where_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    facts = StageFacts(model)
    computed = []
    monkeypatch.setattr(facts, "facts", lambda training: computed.append(training) or StageFacts.facts(facts, training))
    first = [facts.digest(True), facts.digest(False), facts.digest(True), facts.digest(False)]
    assert (first[0], first[1]) == (first[2], first[3])
    assert computed == [True, False]
    model.layers[0].bias.requires_grad_(False)
    assert facts.digest(True) != first[0]
    assert facts.digest(False) == first[1]  # nothing is trained in an evaluation
    model.layers[0].bias.requires_grad_(True)
    assert facts.digest(True) == first[0]
    model.layers[1].update_bias()
    assert facts.digest(False) != first[1]


def test_the_rank_that_few_agree_with_is_named() -> None:
    def everyone(*values: str) -> list[list[tuple[str, dict[str, str]]]]:
        return [[(f"rank {rank}", {"autocast ": value})] for rank, value in enumerate(values)]

    assert differing(everyone("off", "off")) == []
    assert differing([[("rank 0", {"2": "a"})], [("rank 1", {"2": "b", "3": "c"})]]) == ["2"]
    for values, text in (
        (("off", "off", "on", "off"), "autocast is on on rank 2, and off on rank 0"),
        (("on", "off", "off"), "autocast is on on rank 0, and off on rank 1"),
        (("off", "on"), "autocast is on on rank 1, and off on rank 0"),
    ):
        with pytest.raises(RanksDisagree) as caught:
            check_facts(everyone(*values))
        assert caught.value.message == text
