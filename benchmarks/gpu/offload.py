"""Section `offload`: peak and time of a step whose activations leave for the host, and of recomputation instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpu.claims import Bound, Claim, not_measured
from gpu.host_memory import batch_of, blocks, compiled, moved, pipeline, stepping
from gpu.setting import Setting, medians, peak, seconds

CLAIMS = (
    Claim(
        "with a peak as low, activations that leave make a shorter step than the cheapest recomputation",
        "1f1b, 8 ranks on one device, 16 microbatches of 2,048 tokens in bf16, a dense block of width 7168 per stage;"
        " the better of two: the first stage leaves, or all but the last do",
        (Bound("offload.speedup", ">=", 1.06),),
    ),
    Claim(
        "a step whose activations leave is as long as one whose activations stay",
        "the same; activations of the first stage leave",
        (Bound("offload.first_stage.time", "<=", 1.01), Bound("offload.first_stage.peak", "<=", 0.95)),
    ),
    Claim(
        "gradients keep their bits when activations leave",
        "the same; deterministic algorithms of torch",
        (Bound("offload.same_bits", "==", True),),
        on_cpu=True,
    ),
)

LEVELS = ("norm", "act", "full")


def measure(setting: Setting) -> dict[str, Any]:
    ranks, microbatches, tokens = (8, 16, setting.tokens // 2) if setting.gpu else (2, 4, setting.tokens)
    schedule = f"{'1f1b' if setting.gpu else 'gpipe'}(P = {ranks}, M = {microbatches})"
    model = blocks(setting, ranks)
    batch = batch_of(setting, microbatches, tokens)
    lines = recomputations(setting) | {"first_stage": offloads([0])}
    lines |= {"everything": offloads(list(range(ranks - 1)))} if setting.gpu else {}
    pipes = {name: pipeline(model, compiled(schedule, ranks, line)) for name, line in lines.items()}
    steps = {name: stepping(pipe, *batch) for name, pipe in pipes.items()}
    same = same_bits(model, steps["none"], steps["first_stage"])
    times = medians(setting, steps)
    peaks = {name: peak(setting, step) for name, step in steps.items()}
    activations, count = moved(pipes["first_stage"])
    entries: dict[str, Any] = {"same_bits": same, "bytes_per_activation": count // activations}
    if not setting.gpu:
        return {"offload": entries | {"speedup": not_measured("a CPU has no memory of a device; the steps have run")}}
    forward = times["none"] / (3 * ranks * microbatches)
    entries["transfer_over_forward"] = transfer(setting, count // activations) / forward
    entries |= {name: {"time": times[name] / times["none"], "peak": peaks[name] / peaks["none"]} for name in lines}
    return {"offload": entries | against_recomputation(times, peaks)}


def recomputations(setting: Setting) -> dict[str, str]:
    """Lines of recomputation, and none: by level, of the first stage and of all."""
    levels = LEVELS if setting.gpu else LEVELS[-1:]
    scopes = ("stage 0", "all") if setting.gpu else ("all",)
    return {"none": ""} | {f"{level} {scope}": f"recompute {scope} {level}" for level in levels for scope in scopes}


def offloads(stages: list[int]) -> str:
    """Lines that let all activations of these stages leave; a move takes one forward."""
    return f"host 1000 at 1  offload stage {stages if len(stages) > 1 else stages[0]}"


def against_recomputation(times: dict[str, float], peaks: dict[str, int]) -> dict[str, Any]:
    """By what leaves: the cheapest recomputation whose peak is as low, and its time over that of the offload."""
    cheapest: dict[str, dict[str, Any]] = {}
    for name in ("first_stage", "everything"):
        able = [each for each in times if each.partition(" ")[0] in LEVELS and peaks[each] <= peaks[name]]
        if able:
            level = min(able, key=lambda each: times[each])
            cheapest[name] = {"recomputing": level, "speedup": times[level] / times[name]}
    if not cheapest:
        return {"speedup": not_measured("no recomputation has a peak as low")}
    return {"against": cheapest, "speedup": max(each["speedup"] for each in cheapest.values())}


def same_bits(model: nn.Module, *steps: Any) -> bool:
    """Whether the steps give the same loss and the same gradients."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (bits(model, step) for step in steps)
    finally:
        torch.use_deterministic_algorithms(False)
    return all(map(torch.equal, first, second))


def bits(model: nn.Module, step: Any) -> list[Tensor]:
    """The loss of a step and copies of the gradients, from none."""
    model.zero_grad()
    loss: Tensor = step()
    return [loss.clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def transfer(setting: Setting, count: int) -> float:
    """Seconds that the copy of so many bytes to pinned host memory takes."""
    here = torch.empty(count, dtype=torch.uint8, device=setting.device)
    there = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    return min(seconds(setting, lambda: there.copy_(here, non_blocking=True)) for _ in range(5))
