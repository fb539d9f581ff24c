"""Steps whose microbatches have several lengths, on real ranks: beside serial autograd, and beside padded steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import schedc
from schedc.ir.program import Channel, InstructionKind, Program
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.pipeline.build import bound
from schedc_runtime.random_numbers.numbering import named_random
from schedc_runtime.testing import pool
from support.row_cases import summed
from support.runtime_cases import model_for, tokens

LENGTHS = {2: (6, 11), 8: (6, 7, 8, 9, 10, 11, 12, 14)}
"""Lengths of microbatches, by their number."""
SCHEDULES = {"1f1b": (4, 1), "zbh1": (2, 2), "dualpipev": (2, 1)}
"""By schedule: ranks of a pipeline, and replicas."""
MICROBATCHES, ROWS, WIDTH = 16, 2, 16
EQUAL = 1e-13


class ListedBatch:
    """[microbatches] tokens and targets, of lengths in a drawn order. seed: of the order and the tokens."""

    def __init__(self, lengths: Sequence[int], seed: int, replica: int = 0, microbatches: int = MICROBATCHES) -> None:
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(microbatches, generator=draw).tolist()
        self.lengths = [lengths[number % len(lengths)] for number in order]
        seeds = [1 + 1000 * seed + 100 * replica + number for number in range(microbatches)]
        self.parts = [tokens(ROWS, length, own) for length, own in zip(self.lengths, seeds, strict=True)]

    @property
    def given(self) -> tuple[list[Tensor], list[Tensor]]:
        """What `Pipeline.step` takes."""
        return [batch for batch, _ in self.parts], [targets for _, targets in self.parts]

    def padded(self, length: int) -> tuple[Tensor, Tensor]:
        """The same rows, each as long as the longest; padded tokens have no target. [rows, length] each."""

        def filled(column: Sequence[Tensor], value: int) -> Tensor:
            return torch.cat([nn.functional.pad(part, (0, length - part.shape[1]), value=value) for part in column])

        batch, targets = self.given
        return filled(batch, 0), filled(targets, -100)


def serial(model: nn.Module, batches: Sequence[ListedBatch], step: int = 0, *, drawn: bool) -> dict[str, Tensor]:
    """Gradients by name of all microbatches of [replicas] batches, one after the other, by autograd alone.

    The gradients of a replica are summed in its order, those of replicas then. drawn: with a pipeline's random numbers.
    """
    total = sum(targets.numel() for batch in batches for _, targets in batch.parts)
    sums: dict[str, Tensor] = {}
    for replica, batch in enumerate(batches):
        model.zero_grad()
        count = len(batch.parts)
        for number, (rows, targets) in enumerate(batch.parts):
            microbatch = replica * count + number
            with named_random(model.train(drawn), step=step, microbatch=microbatch):
                loss = summed(model(rows), targets).sum * (count * len(batches) / total)
                (loss * (1 / (count * len(batches)))).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
    return sums


@contextmanager
def counted_calls(owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """The positional arguments of each call of a function inside."""
    whole, calls = getattr(owner, name), list[tuple[Any, ...]]()

    def call(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        return whole(*arguments, **keywords)

    setattr(owner, name, call)
    try:
        yield calls
    finally:
        setattr(owner, name, whole)


def elements_sent(program: Program, rank: int, lengths: Sequence[int]) -> int:
    """Numbers that a rank sends in a step, where each message has the size of its microbatch's hidden states."""
    sent = [x for x in program.instructions(rank) if x.kind is InstructionKind.SEND]
    assert {x.channel for x in sent} <= {Channel.ACTIVATION, Channel.GRADIENT}
    return sum(ROWS * lengths[x.microbatch] * WIDTH for x in sent)


def differing(pipe: Pipeline, expected: dict[str, Tensor]) -> tuple[bool, float]:
    """Whether a gradient has other bits than expected, and the largest difference over the largest gradient."""
    grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in expected.values())
    apart = max(float((grad - expected[name]).abs().max()) for name, grad in grads.items())
    return any(not torch.equal(grad, expected[name]) for name, grad in grads.items()), apart / largest


def steps_in_shapes(rank: int, world_size: int, name: str, ranks: int, lengths: list[int]) -> dict[str, Any]:
    """What two steps of each kind did on a rank. The second has the same shapes in another order."""
    program = schedc.compile(name, P=ranks, M=MICROBATCHES)
    replicas = world_size // ranks
    twin, failed, figures = model_for(program, dropout=0.1), list[str](), {"padding": 0.0, "bound_again": 0}

    def pipeline(**options: Any) -> Pipeline:
        mesh = Mesh(ranks, data=replicas)
        return Pipeline(model_for(program, **options), program, loss_fn=summed, mesh=mesh)

    pipe, plain, padded = pipeline(dropout=0.1), pipeline(), pipeline()
    for step in range(3):
        batches = [ListedBatch(lengths, step % 2, replica) for replica in range(replicas)]
        own = batches[pipe.replica]
        transport = next(iter(pipe._network.transports.values()))
        records = pipe.partition.records
        recordings = records.recordings
        with counted_calls(bound, "bind") as binds, counted_calls(transport, "post") as posts:
            pipe.step(*own.given)
        sent = sum(t.numel() for (batch,) in posts for each in batch if not each.receive for t in each.tensors)
        if sent != (wanted := elements_sent(program, pipe.rank, own.lengths)):
            failed.append(f"step {step}: {sent} numbers are sent, not {wanted}")
        figures["sent"] = sent
        figures["sent padded"] = elements_sent(program, pipe.rank, [max(lengths)] * MICROBATCHES)
        if step:
            figures["bound_again"] += len(binds) + records.recordings - recordings
        other, apart = differing(pipe, serial(twin, batches, step, drawn=True))
        if other:
            failed.append(f"step {step}: other bits than serial autograd, {apart:.1e} apart")
        plain.step(*own.given)
        padded.step(*own.padded(max(lengths)))
        _, apart = differing(plain, {name: p.grad for name, p in padded.named_parameters() if p.grad is not None})
        figures["padding"] = max(figures["padding"], apart)
        for each in (pipe, plain, padded):
            each.zero_grad()
    failed += [f"{figures['padding']:.1e} from padded gradients"] * (figures["padding"] > EQUAL)
    failed += ["the second step binds or records again"] * bool(figures["bound_again"])
    for each in (pipe, plain, padded):
        each.close()
    return {"failed": failed, **figures}


def shapes(schedules: Sequence[str] = tuple(SCHEDULES), numbers: Sequence[int] = (2, 8)) -> tuple[int, list[str], Any]:
    """The number of cases, what failed, and figures. A case is a schedule, a number of lengths, a rank and a step.

    padding: largest difference of gradients from those of padded steps. sent: numbers in messages over those of padded
    steps. bound_again: streams bound, and recordings made, in steps of known shapes in another order.
    """
    cases, failed, padding, again, sent = 0, list[str](), 0.0, 0, [0, 0]
    for name in schedules:
        ranks, replicas = SCHEDULES[name]
        for number in numbers:
            told = pool(ranks * replicas).run(
                f"{__name__}:steps_in_shapes", timeout=300, name=name, ranks=ranks, lengths=list(LENGTHS[number])
            )
            cases += 3 * len(told)
            for rank, own in enumerate(told):
                failed += [f"{name}, {number} lengths, rank {rank}: {text}" for text in own["failed"]]
                padding, again = max(padding, own["padding"]), again + own["bound_again"]
                sent = [sent[0] + own["sent"], sent[1] + own["sent padded"]]
    figures = {"lengths": list(numbers), "padding": padding, "sent": sent[0] / sent[1], "bound_again": again}
    return cases, failed, figures
