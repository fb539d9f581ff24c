"""What a `Cut` says beyond where the stages begin."""

from __future__ import annotations

import pytest
import torch

import schedc
from schedc_runtime import Cut, Pipeline
from schedc_runtime.testing import pool
from support.runtime_cases import next_token_loss, small_gpt, tokens


@pytest.mark.processes
def test_stages_of_other_ranks_are_released() -> None:
    (first, first_losses), (second, second_losses) = pool(2).run("runtime.pipeline.cut_cases:released", timeout=120)
    assert (first, second) == ([True, False], [False, True])
    assert first_losses == second_losses
    assert first_losses[0] == first_losses[1]


@pytest.mark.slow
def test_a_dense_model_runs_in_segments_if_the_cut_says_so() -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    losses = []
    for segmented in (False, True):
        pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, in_process=True, cut=Cut(segmented=segmented))
        kinds = {stage.is_cut for place in pipe.places for stage in pipe.held(place)}
        assert kinds == {segmented}
        losses.append(pipe.step(*tokens(4)))
    assert torch.equal(*losses)
