"""Cases of sequences in segments on real ranks: packed rows against each document alone, in models of Transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import schedc
from schedc.ir.placement import linear
from schedc.ir.plan import Host, Level, Offload, Recompute
from schedc.ir.program import Program
from schedc.load.library import Text
from schedc.plan import Plan
from schedc.source import Source
from schedc.step.program.insert_communication import insert_communication
from schedc_runtime import ChunkedLoss, Cut, Loss, Mesh, Pipeline
from schedc_runtime.data.documents import transformers_inputs
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from support.cell_orders import digest, in_each_program
from support.document_cases import alone, packed
from support.gradient_errors import error_of
from support.orders import schedule
from support.tensor_cases import family, wide_norms
from support.tensor_expert_cases import KINDS, expert_family
from support.tensor_level_cases import counting_held

SPLIT = """sched 1
schedule split(P: ranks = 2, M: microbatches = 2, k: segments = 4) {
  place linear
  rank r {
    let w = min(P-r-2+k, M*k)
    phase warmup   repeat w        { F }
    phase steady   repeat M*k - w  { F  I }
    phase cooldown repeat w        { I  W }
    phase flush    repeat M*k - w  { W }
  }
}
"""
"""A split backward over segments, with Ws behind other Is."""
AHEAD = """sched 1
schedule ahead(P: ranks = 2, M: microbatches = 2, k: segments = 4) {
  place linear
  rank r {
    let w = min(P-r-2+k, M*k)
    phase warmup   repeat w        { F }
    phase steady   repeat M*k - w  { F  R  B }
    phase cooldown repeat w        { R  B }
  }
}
"""
"""An R in front of each backward."""
TEXTS = {"split": SPLIT, "ahead": AHEAD}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {},
    "mistral": {"sliding_window": 3},
    "deepseek_v3": {
        "first_k_dense_replace": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "qk_nope_head_dim": 8, "head_dim": 4,
    },
}  # fmt: skip
"""By family, what its tiny configuration has: grouped heads, windows, and latents without experts."""
DEPTH, SEQUENCES, SEGMENTS = 2, 2, 4


def model_of(name: str, **sizes: int) -> nn.Module:
    """A tiny model in float64, the same on every rank."""
    if name in KINDS:
        return expert_family(name, **{"num_hidden_layers": 2, **sizes})
    return family(name, **MODELS[name], **sizes)


def compiled(name: str, M: int = SEQUENCES) -> Program:
    """The program of ``seq1f1b``, or of one of `TEXTS`."""
    if name in TEXTS:
        return schedc.compile(Text(Source(f"{name}.sched", TEXTS[name])), P=DEPTH, M=M, k=SEGMENTS)
    return schedc.compile(name, P=DEPTH, M=M, k=SEGMENTS)


def legal_orders(count: int, seed: int = 0) -> Iterator[Program]:
    """Random orders of `SEQUENCES` in `SEGMENTS` over `DEPTH` stages: Fs, Is and Ws in any legal order.

    Sums over microbatches have one order: backwards are those of sequence 0, then 1, and Ws alike.
    """
    numbers = [m * SEGMENTS + j for m in range(SEQUENCES) for j in reversed(range(SEGMENTS))]
    chance = random.Random(seed)
    for _ in range(count):
        ready: dict[tuple[str, int], list[int]] = {("I", s): list(numbers) for s in range(DEPTH)}
        ready |= {("W", s): list(numbers) for s in range(DEPTH)}
        done: set[tuple[str, int, int]] = set()
        lines: list[list[str]] = [[] for _ in range(DEPTH)]
        total = DEPTH * len(numbers) * 3
        while len(done) < total:
            steps = [("F", s, n) for s in range(DEPTH) for n in numbers if _may_forward(done, s, n)]
            steps += [("I", s, ready["I", s][0]) for s in range(DEPTH) if ready["I", s] and _may_return(
                done, s, ready["I", s][0])]  # fmt: skip
            steps += [("W", s, q[0]) for s in range(DEPTH) if (q := ready["W", s]) and ("I", s, q[0]) in done]
            kind, stage, number = chance.choice(steps)
            done.add((kind, stage, number))
            if kind != "F":
                ready[kind, stage].pop(0)
            lines[stage].append(f"{stage}{kind}{number}")
        order = schedule(lines, linear(DEPTH, len(numbers)), "random")
        yield insert_communication(replace(order, segments=SEGMENTS))


def _may_forward(done: set[tuple[str, int, int]], stage: int, number: int) -> bool:
    earlier = number % SEGMENTS == 0 or ("F", stage, number - 1) in done
    return ("F", stage, number) not in done and earlier and (stage == 0 or ("F", stage - 1, number) in done)


def _may_return(done: set[tuple[str, int, int]], stage: int, number: int) -> bool:
    last = (number // SEGMENTS + 1) * SEGMENTS - 1
    below = stage == DEPTH - 1 or ("I", stage + 1, number) in done
    return below and ("F", stage, last) in done and ("F", stage, number) in done


def loss_fn(output: Any, labels: Tensor) -> Loss:
    """The sum of next tokens' losses, and their number. A `ChunkedLoss` adds to the head in the order of forwards."""
    logits = output["logits"].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return Loss(total, (labels != -100).sum())


def pipe_of(model: nn.Module, program: Program, **options: Any) -> Pipeline:
    """A pipeline of a copy of ``model`` on the packed rows."""
    tokens, documents, _ = packed()
    given = {"loss_fn": ChunkedLoss("lm_head", chunk=5), "mesh": Mesh(DEPTH), "timeout": 60.0, **options}
    return Pipeline(deepcopy(model), program, example=transformers_inputs(tokens[:2], documents[:2]), **given)


def sequences(
    rank: int,
    world: int,
    names: Sequence[str],
    orders: int = 20,
    tensor: int = 1,
    levels: Sequence[str] = (),
    schedules: Sequence[str] = ("seq1f1b", "split", "ahead"),
) -> list[dict[str, Any]]:
    """A case for each family and schedule: errors of loss and gradients, and bits of further legal orders.

    levels: of recomputation, whose bits are those of none; an order with Rs has these alone. held: bytes that a segment
    holds for its backward, by level.
    """
    cases = []
    plans = [Plan(), *(Plan(recompute=(Recompute(Level(level)),) * DEPTH) for level in levels)]
    tokens, documents, targets = packed()
    batch = transformers_inputs(tokens, documents)
    for name in names:
        with wide_norms():
            model = model_of(name)
            loss, gradients = alone(model)
            mesh = Mesh(DEPTH, experts=tensor if name in KINDS else 1, tensor=tensor)
            programs = {each: [compiled(each)] for each in schedules if levels or each != "ahead"}
            if orders:
                programs["random"] = list(legal_orders(orders))
            for schedule_name, several in programs.items():
                errors, held, bits = [], list[int](), set()
                options = {"loss_fn": loss_fn} if schedule_name == "random" else {}
                for plan in plans[schedule_name == "ahead" :]:
                    with closing(pipe_of(model, several[0], mesh=mesh, plan=plan, **options)) as pipe:
                        for stage in pipe.held(pipe.places[0]) if levels else ():
                            stage.set_recomputation(plan.recompute_of(stage.index), count=True)
                        for _ in in_each_program(pipe, several):
                            with counting_held() if levels else nullcontext({}) as counted:
                                got = pipe.step(batch, targets).item()
                            held += [counted[min(counted)]] if levels else []
                            errors += [error_of(pipe, gradients), abs(got - loss) / loss]
                            bits.add(digest(pipe))
                case = {"family": name, "schedule": schedule_name, "orders": len(several)}
                cases.append(
                    case | {"error": max(errors), "equal": len(bits) == 1} | ({"held": held} if levels else {})
                )
    return cases


def evaluated(rank: int, world: int) -> dict[str, float]:
    """Largest differences of outputs and of the loss of an evaluation from those of whole rows; of two steps' bits."""
    tokens, documents, targets = packed()
    batch = transformers_inputs(tokens, documents)
    with wide_norms():
        model = model_of("llama", num_hidden_layers=2)
        whole = deepcopy(model).eval()(**batch).logits
        with closing(pipe_of(model, compiled("seq1f1b"), loss_fn=loss_fn)) as pipe:
            result = pipe.evaluate(batch, targets, outputs=True)
            trained = pipe.step(batch, targets, outputs=True)
            fewer = pipe.evaluate({name: value[:4] for name, value in batch.items()}, targets[:4], microbatches=4)
        expected = loss_fn({"logits": whole}, targets)
        told = {"loss": abs(result.loss.item() - (expected.sum / expected.count).item())}
        told |= {"fewer": fewer.item() - loss_fn({"logits": whole[:4]}, targets[:4]).sum.item() / int(
            (targets[:4] != -100).sum())}  # fmt: skip
        if result.outputs is not None:
            told |= {"outputs": (result.outputs["logits"] - whole).abs().max().item()}
            told |= {"trained": (trained.outputs["logits"] - whole).abs().max().item()}
        return told


def refusals(rank: int, world: int) -> dict[str, str]:
    """What is said of what segments do not serve, by name."""
    tokens, documents, targets = packed()
    batch = transformers_inputs(tokens, documents)
    program, small = compiled("seq1f1b"), model_of("llama", num_hidden_layers=2)

    def told(step: Any = None, model: Any = None, own: Program = program, **options: Any) -> str:
        try:
            pipe = pipe_of(small if model is None else model, own, **options)
        except RuntimeFault as fault:
            return str(fault)
        try:
            if step is not None:
                pipe.step(*step)
        except (RuntimeFault, InstructionError) as fault:
            return str(fault)
        finally:
            pipe.close()
        return ""

    def refused(*batch: Any) -> str:
        try:
            pipe.step(*batch)
        except RuntimeFault as fault:
            return str(fault)
        return ""

    short = {name: value[:, :6] for name, value in batch.items()}
    backward = _backward_first()
    with closing(pipe_of(small, program)) as pipe:
        batches = {
            "positions": refused({"input_ids": tokens}, targets),
            "mask": refused({**batch, "attention_mask": torch.ones_like(tokens)}, targets),
            "tokens": refused(short, targets[:, :6]),
            "rows": refused({name: value[:7] for name, value in batch.items()}, targets[:7]),
            "list": refused([batch, batch], [targets, targets]),
            "numbers": refused(batch, targets[:, 0]),
        }
    return batches | {
        "compile": told(compile={"backend": "aot_eager"}),
        "graphs": told(cut=Cut(graphs=True)),
        "offload": told(plan=Plan(host=Host(2e11, 5e10, 5e10), offload=(Offload("all"),))),
        "slices": told(plan=Plan(slices=(2,) * DEPTH)),
        "shift": told(loss_fn=ChunkedLoss("lm_head", shift=True)),
        "mean": told((batch, targets), loss_fn=lambda output, labels: output["logits"].sum()),
        "state": told(model=_with_layers(deepcopy(small), "linear_attention")),
        "forward": told((batch, targets), own=backward[0]),
        "backward": told((batch, targets), own=backward[1]),
    }


def _backward_first() -> tuple[Program, Program]:
    """Programs whose second segment is forwarded first, and whose first one returns first."""
    numbers = range(SEGMENTS)
    texts = []
    for forward, backward in (((1, 0, 2, 3), reversed(numbers)), (numbers, numbers)):
        ops = [f"F{n}" for n in forward] + [f"B{n}" for n in backward]
        texts.append([[f"{stage}{op}" for op in ops] for stage in range(DEPTH)])
    orders = (schedule(lines, linear(DEPTH, SEGMENTS), "wrong") for lines in texts)
    first, second = (insert_communication(replace(order, segments=SEGMENTS)) for order in orders)
    return first, second


def _with_layers(model: Any, kind: str) -> nn.Module:
    model.config.layer_types = [kind] * model.config.num_hidden_layers
    return model
