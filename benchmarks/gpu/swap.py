"""Section `swap`: the longest sequence under full recomputation, with its inputs on the device and on the host."""

from __future__ import annotations

from typing import Any

from gpu.claims import Bound, Claim, not_measured
from gpu.host_memory import batch_of, blocks, compiled, moved, pipeline, stepping
from gpu.setting import Setting, out_of_memory, peak, release

CLAIMS = (
    Claim(
        "full recomputation whose inputs leave for the host fits sequences at least as long, with a lower peak",
        "gpipe on one rank, 8 microbatches of one sequence of up to 64 K tokens in bf16, four blocks of width 7168",
        (Bound("swap.longest_over_kept", ">=", 1.0), Bound("swap.peak_over_kept", "<=", 0.9)),
    ),
)

LINES = {"kept": "recompute all full", "swapped": "recompute all full  host 1000 at 1  offload stage 0"}


def measure(setting: Setting) -> dict[str, Any]:
    lengths = [1 << power for power in range(12, 17)] if setting.gpu else [setting.tokens]
    entries: dict[str, Any] = {name: run(setting, line, lengths) for name, line in LINES.items()}
    if not setting.gpu:
        return {"swap": entries | {"longest_over_kept": not_measured("a CPU has no memory of a device")}}
    kept, swapped = entries["kept"]["peak_bytes"], entries["swapped"]["peak_bytes"]
    if not (common := kept.keys() & swapped.keys()):
        return {"swap": entries | {"longest_over_kept": not_measured("the shortest sequence does not fit")}}
    longest = max(common, key=int)
    entries["longest_over_kept"] = entries["swapped"]["longest"] / entries["kept"]["longest"]
    return {"swap": entries | {"compared_at": int(longest), "peak_over_kept": swapped[longest] / kept[longest]}}


def run(setting: Setting, line: str, lengths: list[int]) -> dict[str, Any]:
    """The longest of these lengths that fits, bytes at the peak of each that does, and bytes that left."""
    ranks, layers, microbatches = (1, 4, 8) if setting.gpu else (2, 2, 4)
    model = blocks(setting, layers)
    program = compiled(f"gpipe(P = {ranks}, M = {microbatches})", layers, line)
    peaks: dict[str, int] = {}
    left = 0
    for length in lengths:
        pipe = pipeline(model, program)
        try:
            step = stepping(pipe, *batch_of(setting, microbatches, length))
            if not peaks:
                step()  # what comes first are the gradients
            peaks[str(length)] = peak(setting, step)
            left = moved(pipe)[1]
        except Exception as error:
            if not out_of_memory(error):
                raise
            break
        finally:
            pipe.close()
            release()
    return {"longest": max(map(int, peaks), default=0), "peak_bytes": peaks, "bytes_moved": left}
