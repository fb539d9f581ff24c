"""What a step costs with pieces of a state beside it, and with the keeper's writer at work, in processor time."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import schedc
from schedc_runtime import Checkpoints, Pipeline
from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.saved.form import COMMIT, step_folder
from support.runtime_cases import next_token_loss

PIECES, WRITER = 1.03, 1.2
"""The most that a step may cost with pieces, and beside the writer, in steps without."""
_TOKENS, _ROWS, _WIDTH = 256, 16, 128
"""Tokens of a row, rows of a step, columns. 0.9 million parameters see 4,096 tokens; large models see more per rank."""
_LONGEST = 60.0
"""Seconds in which a state must be on disk."""


def step_costs(pairs: int) -> dict[str, Any]:
    """Medians of ``pairs`` pairs of steps, each in turn with the other.

    step_ratio: a step of `Checkpoints` with its pieces, in steps of the pipeline. writer_ratio: a step while the keeper
    writes a state, in steps while it does not. at_work: steps at whose begin the state was not on disk.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=_WIDTH, heads=4, blocks=4, vocab=256, context=_TOKENS))
    pipe = Pipeline(model, schedc.compile("1f1b", P=2, M=8), loss_fn=next_token_loss, in_process=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-3)
    ids = torch.randint(0, 256, (_ROWS, _TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        saved = Checkpoints(Path(folder) / "run", pipe, optimizer, copy="beside", durable=1)
        saved.resume()

        def timed(step: Any) -> float:
            begin = time.process_time()
            step(ids, ids)
            taken = time.process_time() - begin
            optimizer.step()
            optimizer.zero_grad()
            return taken

        for _ in range(3):
            timed(saved.train)
            timed(pipe.step)
        pieces, written, at_work = [], [], 0
        for _ in range(pairs):
            with_pieces, at = timed(saved.train), saved.step - 1
            record = step_folder(saved.root, at) / COMMIT
            at_work += not record.is_file()
            beside_writer = timed(pipe.step)
            _await(record)
            alone = timed(pipe.step)
            pieces.append(with_pieces / alone)
            written.append(beside_writer / alone)
        saved.close()
        pipe.close()
    return {"step_ratio": round(median(pieces), 3), "writer_ratio": round(median(written), 3), "at_work": at_work}


def _await(record: Path) -> None:
    deadline = time.monotonic() + _LONGEST
    while not record.is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{record} was not written")
        time.sleep(0.01)
