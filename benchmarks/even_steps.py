"""Runs steps of copied experts on eight real processes: the ranks' side and the figures of `benchmarks/balance.py`.

Two nodes of four ranks share the experts of a transformer with two MoE layers, or two pipelines of four for bits.
Choices are prescribed to the routers: each token takes different experts, by Zipf's law. Each layer has its own popular
experts, and every microbatch draws anew.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from runtime.moe.even_cases import EXPERT, IN_PLACE, STEP, Case, Results, differing, run
from runtime.moe.hot_cases import layers_of
from schedc.ir.arrays import Int64
from schedc.ir.balance import STEP_SLOTS
from schedc.step.costs.forest import forest_of
from schedc_runtime import Pipeline
from schedc_runtime.moe.counts import METHODS
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.moe.step_plan import plan_step
from schedc_runtime.testing import pool
from support.expert_cases import compiled
from support.reference_runs import spread
from support.runtime_cases import next_token_loss
from support.segmented_cases import small_moe

NODES, PER_NODE = 2, 4
RANKS = NODES * PER_NODE
EXPERTS, TOP, LAYERS, MICROBATCHES, STEPS = 64, 4, 2, 4, 3
WIDTH, INNER, LENGTH = 8, 4, 8
LOCAL = EXPERTS // RANKS
SKEWS = {"zipf_1.0": 1.0, "zipf_0.6": 0.6, "balanced": 0.0}
WITHIN, IN_THE_MEAN = Fraction("1.01"), 1.03
"""Rows of the fullest rank over the mean: at most in a microbatch, and at most in the mean by step."""
WAYS = {
    "none": "",
    "by microbatch": f"  balance by microbatch within {float(WITHIN)} over group",
    "by step": f"{STEP} over group",
}
EVEN = -1.0
"""In place of an exponent: all experts get equally many rows."""
BYTES_OF_EXPERT = 3 * WIDTH * INNER
SCHEDULES = {"1f1b": {"P": 2, "M": 2}, "zbh1": {"P": 2, "M": 3}, "dualpipev": {"P": 2, "M": 4}}
TYPES = ("float32", "bfloat16", "float64")
REFERENCES = {"plain": "plain", **IN_PLACE}
"""By way: whose bits it must have."""


class Draws(NamedTuple):
    """What routers choose: ``tokens`` of a rank in a microbatch, by an exponent of Zipf's law."""

    exponent: float
    tokens: int
    seed: int

    def choices(self, layer: int, turn: int, rank: int) -> Int64:
        """[tokens, TOP] different experts: the largest of log(share) + Gumbel noise. turn: microbatch of all steps."""
        if self.exponent == EVEN:
            return np.asarray(np.arange(self.tokens * TOP).reshape(-1, TOP) % EXPERTS)
        popular = np.random.default_rng([self.seed, layer]).permutation(EXPERTS)
        scores = -self.exponent * np.log(np.arange(1, EXPERTS + 1))
        noise = np.random.default_rng([self.seed, layer, turn, rank]).gumbel(size=(self.tokens, EXPERTS))
        return np.asarray(popular[(scores + noise).argsort(-1)[:, : -TOP - 1 : -1]])

    def rows(self, layer: int, turn: int) -> Int64:
        """[ranks, local experts] rows by home and expert, of the tokens of all ranks."""
        counts = [np.bincount(self.choices(layer, turn, rank).ravel(), minlength=EXPERTS) for rank in range(RANKS)]
        return np.sum(counts, 0).reshape(RANKS, LOCAL)


class Prescribed:
    """The choices of a router in the order of its forwards, in place of those by its scores."""

    def __init__(self, draws: Draws, layer: int, rank: int) -> None:
        self.draws, self.layer, self.rank, self.turn = draws, layer, rank, 0

    def __call__(self, scores: Tensor) -> Tensor:
        self.turn += 1
        chosen = self.draws.choices(self.layer, self.turn - 1, self.rank)
        return torch.from_numpy(np.ascontiguousarray(chosen))


def pipeline_of(way: str, tokens: int) -> Pipeline:
    """Two MoE layers over all ranks. Raises `RuntimeFault` where the plan is refused."""
    routing = RouterConfig(experts=EXPERTS, top=TOP)
    model = small_moe(moe_blocks=LAYERS, dense_blocks=1, routing=routing, expert_inner=INNER, width=WIDTH).float()
    lines = f"  experts {EXPERTS} top {TOP}\n  topology nodes {NODES} x {PER_NODE}\n  overlap auto\n{WAYS[way]}\n"
    program = compiled("1f1b", {"P": 1, "M": MICROBATCHES}, lines, f"{LAYERS + 1} dense 1")
    example = torch.zeros(MICROBATCHES * tokens // LENGTH, LENGTH, dtype=torch.int64)
    return Pipeline(model, program, loss_fn=next_token_loss, timeout=120, example=example)


def rank_of_steps(rank: int, world_size: int, way: str, draws: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """By draws, of ``STEPS`` steps of this process: computed rows by layer and microbatch, and bytes sent by label."""
    each_draws = [Draws(*each) for each in draws]
    tokens = each_draws[0].tokens
    pipe = pipeline_of(way, tokens)
    layers = layers_of(pipe)
    rows: list[list[int]] = [[] for _ in layers]
    for layer, counted in zip(layers, rows, strict=True):
        layer.experts.register_forward_pre_hook(lambda _, given, counted=counted: counted.append(len(given[0])))
    sent = labelled(layers)
    batch = torch.zeros(MICROBATCHES * tokens // LENGTH, LENGTH, dtype=torch.int64)
    figures = []
    for drawn in each_draws:
        for number, layer in enumerate(layers):
            layer.router._chosen = Prescribed(drawn, number, rank)
            rows[number].clear()
        told = []
        for _ in range(STEPS):
            sent.clear()
            pipe.zero_grad()
            pipe.step(batch, batch)
            told.append(dict(sent))
        figures.append({"rows": [list(each) for each in rows], "sent": told})
    pipe.close()
    return figures


def labelled(layers: Sequence[MoELayer]) -> Counter[str]:
    """Bytes that this rank sends to others from now on, by label of the exchange."""
    sent: Counter[str] = Counter()
    for group in {id(layer.routing.group.expert): layer.routing.group.expert for layer in layers}.values():
        begin: Callable[..., Any] = group.all_to_all

        def all_to_all(tensors: Any, send: Any, receive: Any, label: str = "", me: Any = group, go: Any = begin) -> Any:
            before = sum(me.sent) - me.sent[me.rank]
            handle = go(tensors, send, receive, label)
            sent[label] += sum(me.sent) - me.sent[me.rank] - before
            return handle

        group.all_to_all = all_to_all  # type: ignore[method-assign]
    return sent


def rows(options: argparse.Namespace) -> dict[str, Any]:
    """How full the fullest rank is, counted where rows are computed."""
    draws = [Draws(exponent, options.tokens, options.seed) for exponent in SKEWS.values()]
    mean = options.tokens * TOP
    figures: dict[str, Any] = {name: {} for name in SKEWS}
    failed = cases = 0
    for way in WAYS:
        answers = pool(RANKS).run("even_steps:rank_of_steps", timeout=900, way=way, draws=draws)
        for name, ranks in zip(SKEWS, zip(*answers, strict=True), strict=True):
            table = np.array([each["rows"] for each in ranks])[:, :, MICROBATCHES:]  # the first step copies nothing
            fullest = table.max(0) / mean
            figures[name][way] = {"mean": float(fullest.mean()), "worst": float(fullest.max())}
            cases += fullest.size
            failed += int((table.sum(0) != mean * RANKS).sum())
            if way == "by microbatch":
                failed += int((table.max(0) > -(-mean * WITHIN // 1)).sum())
            if way == "by step":
                failed += int(fullest.mean() > IN_THE_MEAN)
    return {"cases": cases, "failed": failed, **figures}


def moved_bytes(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of copies and of their gradients, counted and by the plans of the drawn rows."""
    kinds = {**SKEWS, "even": EVEN}
    draws = [Draws(exponent, options.tokens, options.seed) for exponent in kinds.values()]
    figures: dict[str, Any] = {name: {} for name in kinds}
    failed = cases = 0
    for way, expected in (("by microbatch", by_microbatch), ("by step", by_step)):
        answers = pool(RANKS).run("even_steps:rank_of_steps", timeout=900, way=way, draws=draws)
        for name, drawn, ranks in zip(kinds, draws, zip(*answers, strict=True), strict=True):
            wanted = np.array([expected(drawn, step) for step in range(1, STEPS)])  # [steps, direction, ranks]
            told = [[[each["sent"][step].get(label, 0) for each in ranks] for label in ("hot", "hot backward")]
                    for step in range(1, STEPS)]  # fmt: skip
            wrong = int((np.array(told) != wanted).sum())
            if name == "even":
                wrong += int(wanted.any())
            cases, failed = cases + wanted.size, failed + wrong
            figures[name][way] = dict(zip(("copies", "gradients"), np.array(told).sum((0, 2)).tolist(), strict=True))
    return {"cases": cases, "failed": failed, **figures}


def by_microbatch(draws: Draws, step: int) -> Int64:
    """[2, ranks] bytes of weights and of gradients that ranks send in a step."""
    sent = np.zeros((2, RANKS), dtype=np.int64)
    for layer, turn in product(range(LAYERS), range(MICROBATCHES)):
        plan = forest_of(draws.rows(layer, step * MICROBATCHES + turn), WITHIN)
        for rank, (parent, copies) in enumerate(zip(plan.parent, (plan.quota > 0).sum(1), strict=True)):
            sent[0, parent] += copies
            sent[1, rank] += copies
    return sent * BYTES_OF_EXPERT * 4


def by_step(draws: Draws, step: int) -> Int64:
    """[2, ranks] as `by_microbatch`; copies follow the rows of the step before."""
    sent = np.zeros((2, RANKS), dtype=np.int64)
    for layer in range(LAYERS):
        before = [draws.rows(layer, (step - 1) * MICROBATCHES + turn) for turn in range(MICROBATCHES)]
        squares = np.sum([each.sum(1) ** 2 for each in before], 0)
        held = plan_step(np.sum(before, 0).ravel().tolist(), squares.tolist(), MICROBATCHES, STEP_SLOTS)
        for rank, experts in enumerate(held):
            sent[1, rank] += len(experts)
            for expert in experts:
                sent[0, expert // LOCAL] += 1
    return sent * BYTES_OF_EXPERT * 4


def bits(options: argparse.Namespace) -> dict[str, Any]:
    """Cases of schedules, types, methods and ways whose loss or gradients have other bits than they must have.

    The four ranks that share experts are one node with ``flat``, and two with two hops.
    """
    runs = [
        Case(name, sizes, dtype, nodes=1 if method == "flat" else NODES, ranks=RANKS, method=method)
        for (name, sizes), dtype, method in product(SCHEDULES.items(), TYPES, METHODS)
    ]
    answers = pool(RANKS).run("even_steps:rank_of_bits", timeout=1500, runs=runs)
    wrong: dict[str, list[str]] = {}
    for index, (case, way) in enumerate(product(runs, REFERENCES)):
        names = sorted({name for rank in answers for name in rank[index][0]})
        wrong |= {f"{case.schedule}, {case.dtype}, {case.method}, {way}": names} if names else {}
    apart = max(rank[index][1] for rank in answers for index in range(len(answers[0])))
    failed = len(wrong) + int(not 0 < apart <= 1e-12)
    return {"cases": len(answers[0]), "failed": failed, "expert_gradients_apart": apart, "wrong": wrong}


def rank_of_bits(rank: int, world_size: int, runs: Sequence[Sequence[Any]]) -> list[tuple[list[str], float]]:
    """By run and way: names of what has other bits than it must have, and the error of experts' gradients.

    The error is that against the plain run in float64, over the largest number; 0 in other types.
    """
    cases = [Case(*each) for each in runs]
    kinds = list(product(cases, REFERENCES.values()))
    references = dict(zip(product(range(len(cases)), REFERENCES), spread(_reference, kinds), strict=True))
    outcomes = []
    for number, way in references:
        mine, plain = run(cases[number], way, here=False), references[number, "plain"]
        wrong = differing(mine, references[number, way])
        apart = 0.0
        for name, grad in mine.gradients.items():
            if not name.endswith(EXPERT):
                wrong += [] if torch.equal(grad, plain.gradients[name]) else [name]
            elif cases[number].dtype == "float64":
                apart = max(apart, float((grad - plain.gradients[name]).abs().max() / grad.abs().max()))
        outcomes.append((wrong, apart))
    return outcomes


def _reference(case_and_way: tuple[Case, str]) -> Results:
    return run(*case_and_way)
