"""Section `loss`: head and loss in chunks over the whole loss: time, and bytes at the peak."""

from __future__ import annotations

from typing import Any

import torch
from chunked_loss import FORMS, in_chunks, peak, run, whole

from gpu.claims import Bound, Claim
from gpu.setting import Setting, drawn, medians
from gpu.setting import peak as peak_of_device

CONDITION = "bf16, 32,768 hidden states of width 2,048, 65,536 words (V = 32 H), chunks of 1,024; both ways"

CLAIMS = (
    Claim(
        "a loss in chunks needs a fraction of the memory of the whole loss",
        CONDITION,
        (Bound("loss.early.peak", "<=", 0.15), Bound("loss.again.peak", "<=", 0.15)),
    ),
    Claim(
        "`early` multiplies as often as the whole loss, and takes no longer",
        CONDITION,
        (Bound("loss.early.time", "<=", 1.05),),
    ),
    Claim(
        "`again` makes the logits once or twice more, which is all that it takes",
        f"{CONDITION}; five products by the head in place of three",
        (Bound("loss.again.time", "<=", 1.7),),
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    rows, width, chunk = (32768, 2048, 1024) if setting.gpu else (64, 16, 16)
    vocabulary = 32 * width
    x, weight = drawn(setting, rows, width), drawn(setting, vocabulary, width, seed=1) / width**0.5
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(2)).to(setting.device)
    losses = {"whole": whole, **{form: in_chunks(form, chunk) for form in FORMS}}
    runs = {name: lambda loss=loss: run(loss, x, weight, targets) for name, loss in losses.items()}
    times = medians(setting, runs)
    # A CPU's peak is counted by storages.
    peaks = {
        name: peak_of_device(setting, runs[name]) if setting.gpu else peak(loss, x, weight, targets)
        for name, loss in losses.items()
    }
    forms = {name: {"peak": peaks[name] / peaks["whole"], "time": times[name] / times["whole"]} for name in FORMS}
    return {"loss": {"rows": rows, "width": width, "vocabulary": vocabulary, "peak_bytes": peaks} | forms}
