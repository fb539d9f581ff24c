"""Trains small models through the whole loop: the clip norm, means over tokens, padded batches, deaths, and recipes.

norm_values       distinct clip norms over the schedules and numbers of ranks that add up microbatches in one order;
                  ``other_orders`` is the largest relative distance of those that add in another order
token_mean_error  the largest difference to one mean over all tokens by autograd of the whole model, of losses and
                  gradients: over schedules, replicas and calls that add up
ragged_error      the same for batches whose rows do not divide into microbatches
death_seconds     the longest time from the next call to the error that names the rank, of ranks that died between
                  two steps
recipes           whether the tests of each trainer around a pipeline pass
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import schedc
from schedc_runtime import Loss, Mesh, Pipeline
from schedc_runtime.errors import PeerFailure
from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.testing import RankError, pool

ROOT = Path(__file__).resolve().parents[2]
MICROBATCHES, VOCABULARY, LENGTH, IGNORED = 8, 48, 8, -100
ONE_ORDER = (
    ("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("1f1b", 8), ("gpipe", 4), ("eager_1f1b", 4), ("interleaved_1f1b", 2),
    ("zbh1", 1), ("zbh1", 4), ("zbh2", 2), ("zbv", 2), ("zbv", 4), ("vhalf", 2), ("vmin", 4), ("zb_auto", 4),
    ("dualpipev", 2), ("dualpipev", 4), ("hanayo", 2), ("1f1b_overlap", 4),
)  # fmt: skip
OTHER_ORDER = (("dualpipe", 2), ("dualpipe", 4), ("chimera", 2), ("looped_bfs", 2))
"""Two copies of every stage, or a backward that takes microbatches in another order."""
RECIPES = (
    "accelerate_trains_as_a_plain_loop", "lightning_trains_as_a_plain_loop", "torchtitan_trains_as_a_plain_loop",
    "hugging_face_honours_its_arguments", "a_killed_run_goes_on_bit_by_bit",
    "another_number_of_ranks_goes_on_with_the_same_bits",
)  # fmt: skip


def measure() -> dict[str, Any]:
    """All cases, each with what it compares, and the keys that the module describes."""
    torch.set_num_threads(1)
    cases = [*norms(), *means(), *deaths(), *recipes()]
    norm = {case["norm"] for case in cases if case["case"] == "norm" and case["one_order"]}
    first = next(iter(norm))
    return {
        "norm_values": len(norm),
        "other_orders": max(abs(case["norm"] / first - 1.0) for case in cases if case["case"] == "norm"),
        "token_mean_error": max(case["error"] for case in cases if case["case"] == "tokens"),
        "ragged_error": max(case["error"] for case in cases if case["case"] == "ragged"),
        "death_seconds": max(case["seconds"] for case in cases if case["case"] == "death"),
        "recipes": {case["name"]: case["right"] for case in cases if case["case"] == "recipe"},
        "cases": cases,
    }


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(width=24, heads=2, blocks=16, vocab=VOCABULARY, context=LENGTH)).double()


def data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """[rows, tokens] each; 40 % of the targets are ignored, and the first rows have fewer than the last."""
    generator = torch.Generator().manual_seed(seed)
    batch, targets = torch.randint(0, VOCABULARY, (2, rows, LENGTH), generator=generator)
    share = torch.linspace(0.2, 0.6, rows).unsqueeze(1)
    targets[torch.rand(targets.shape, generator=generator) > 1 - share] = IGNORED
    return batch, targets


def token_loss(logits: Tensor, targets: Tensor) -> Loss:
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return Loss(total, (targets != IGNORED).sum())


def pipeline(schedule: str, ranks: int, replicas: int = 1) -> Pipeline:
    program = schedc.compile(schedule, P=ranks, M=MICROBATCHES)
    mesh = Mesh(ranks, data=replicas)
    return Pipeline(model(), program, loss_fn=token_loss, mesh=mesh, in_process=True)


def norms() -> list[dict[str, Any]]:
    """The norm of one step's gradients, by schedule and number of ranks."""
    cases = []
    for schedule, ranks in (*ONE_ORDER, *OTHER_ORDER):
        pipe = pipeline(schedule, ranks)
        pipe.step(*data(2 * MICROBATCHES, seed=1))
        norm = pipe.clip_grad_norm_(0.1).item()
        one_order = (schedule, ranks) in ONE_ORDER
        cases.append({"case": "norm", "schedule": schedule, "P": ranks, "norm": norm, "one_order": one_order})
    return cases


def means() -> list[dict[str, Any]]:
    """Means over tokens: whole batches, replicas, calls that add up, and batches that do not divide."""
    even, uneven = 2 * MICROBATCHES, MICROBATCHES + 3
    cases = []
    for schedule, ranks in (("1f1b", 4), ("zbv", 2), ("dualpipe", 2), ("dualpipev", 4)):
        for kind, rows, replicas in (
            ("tokens", [even], 1), ("tokens", [even, even, even], 1), ("tokens", [2 * even], 2),
            ("ragged", [uneven], 1), ("ragged", [3], 1), ("ragged", [even, uneven], 1), ("ragged", [uneven], 2),
        ):  # fmt: skip
            error = mean_error(pipeline(schedule, ranks, replicas), rows)
            cases.append(
                {"case": kind, "schedule": schedule, "P": ranks, "replicas": replicas, "rows": rows, "error": error}
            )
    return cases


def mean_error(pipe: Pipeline, rows: list[int]) -> float:
    """The largest difference of a gradient, or of the mean loss, to one mean over all tokens of all calls."""
    batches = [data(each, seed) for seed, each in enumerate(rows)]
    results = [pipe.step(*each, accumulate=len(rows), outputs=True) for each in batches]
    twin = model()
    losses = [token_loss(twin(batch), targets) for batch, targets in batches]
    count = sum(int(each.count) for each in losses)
    mean = torch.stack([each.sum for each in losses]).sum() / count
    mean.backward()
    loss = sum(float(each.loss) * each.count for each in results) / count
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    errors = [float((p.grad - gradients[name]).abs().max()) for name, p in pipe.named_parameters()]
    return max(abs(loss - float(mean.detach())), *errors)


def deaths() -> list[dict[str, Any]]:
    """Ranks that are killed between two steps: the last one, and the first."""
    cases = []
    for dead in (3, 0):
        answers = pool(4).outcomes("trainers.loop:dying", dead=dead, timeout=60)
        alive = [answer for answer in answers if not isinstance(answer, RankError)]
        named = all(answer["rank"] == f"rank {dead}" for answer in alive)
        seconds = max(answer["seconds"] for answer in alive)
        cases.append({"case": "death", "rank": dead, "named": named, "seconds": seconds if named else float("inf")})
    return cases


def dying(rank: int, world_size: int, dead: int) -> dict[str, Any]:
    """Takes a step, after which one rank is killed; what the next call raises, and after how many seconds."""
    pipe = Pipeline(model(), schedc.compile("1f1b", P=world_size, M=MICROBATCHES), loss_fn=token_loss, timeout=60)
    pipe.step(*data(2 * MICROBATCHES, seed=1))
    if rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    start = time.monotonic()
    try:
        pipe.step(*data(2 * MICROBATCHES, seed=2))
    except PeerFailure as error:
        return {"rank": error.rank, "seconds": time.monotonic() - start}
    return {"rank": "", "seconds": time.monotonic() - start}


def recipes() -> list[dict[str, Any]]:
    """The tests of the trainers' examples, each by itself. A skipped test is not right."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "tests/runtime/trainers"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = set(re.findall(r"^PASSED \S+::test_(\w+)", result.stdout, re.MULTILINE))
    return [{"case": "recipe", "name": name, "right": name in passed} for name in RECIPES]
