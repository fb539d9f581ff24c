"""A rank that dies between two steps is named by the next call of the others, long before any timeout."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.errors import PeerFailure
from schedc_runtime.testing import RankError, pool
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.sweeps import halved


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(("dead", "late"), halved([(1, 0.0), (0, 0.0), (1, 1.0)]))
def test_it_is_named(dead: int, late: float) -> None:
    """late: seconds between the call of the other rank and the death. Rank 0 holds no store here."""
    answers = pool(2).outcomes("runtime.ranks.test_death_between:dying", dead=dead, late=late)
    assert isinstance(answers[dead], RankError)
    text, seconds = answers[1 - dead]
    assert text.startswith(f"rank {dead} (pid ")
    assert "is dead: " in text
    assert "it was between steps, behind step 1" in text
    assert seconds < late + 4


def dying(rank: int, world_size: int, dead: int, late: float) -> list[Any]:
    pipe = Pipeline(small_gpt(blocks=2), schedc.compile("1f1b", P=2, M=2), loss_fn=next_token_loss, timeout=60)
    pipe.step(*tokens(4))
    if rank == dead:
        time.sleep(late)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.0 if late else 0.3)
    start = time.monotonic()
    with pytest.raises(PeerFailure) as caught:
        pipe.step(*tokens(4))
    return [str(caught.value), time.monotonic() - start]
