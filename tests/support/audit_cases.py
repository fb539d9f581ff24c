"""Flips of bits inside a stage of a rank, and the verdicts of an audit: the cases of ``prove``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Audit, Mesh, Pipeline, WrongBits
from schedc_runtime.audit.verdict import NAMING, AuditVerdict
from schedc_runtime.audit.watch import AuditWatch
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.stage.stage import Stage

STEPS = ("forward", "backward", "weight")
"""The methods of a stage in which bits flip."""


class Flip(NamedTuple):
    """One bit flips in the result of an operation, or in a weight, while a rank runs a microbatch.

    where: a method of `STEPS`, or ``weights``. nth, element, bit: which result, element and bit; counts go round.
    lasting: whether it flips in each run of the method, or in the weight for good; else in the first run only.
    """

    where: str
    nth: int
    element: int
    bit: int
    lasting: bool


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element, in place and unseen by autograd. Numbers go round."""
    flat = tensor.data.reshape(-1).view(torch.uint8) if tensor.is_contiguous() else None
    if flat is None:
        place = tuple(int(x) for x in torch.unravel_index(torch.tensor(element % tensor.numel()), tensor.shape))
        one = tensor.data[place].clone().reshape(1)
        flip_bit(one, 0, bit)
        tensor.data[place] = one[0]
        return
    byte, within = divmod(bit % (8 * tensor.element_size()), 8)
    flat[element % tensor.numel() * tensor.element_size() + byte] ^= 1 << within


class _FlippedResult(TorchDispatchMode):
    """Counts the floating results of operations, and flips a bit in one of them."""

    def __init__(self, flip: Flip | None = None, at: int = -1) -> None:
        super().__init__()
        self.flip, self.at, self.count = flip, at, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if not function.is_view and isinstance(each, Tensor) and each.is_floating_point() and each.numel():
                if self.count == self.at and self.flip is not None:
                    flip_bit(each, self.flip.element, self.flip.bit)
                self.count += 1
        return result


class FaultyStage:
    """A stage that runs a microbatch with a flip. Without a flip it counts the results of each method.

    It patches the methods of one `Stage` inside ``with``: in the step, and when the same rank repeats it.
    """

    def __init__(
        self, stage: Stage, microbatch: int, flip: Flip | None = None, counts: dict[str, int] | None = None
    ) -> None:
        self.stage, self.microbatch, self.flip = stage, microbatch, flip
        self.counts: dict[str, int] = {} if counts is None else counts
        """Number of results of each method, from a run without a flip."""
        self._ran: set[str] = set()

    def __enter__(self) -> FaultyStage:
        for name in STEPS:
            setattr(self.stage, name, partial(self._run, name, getattr(self.stage, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name in STEPS:
            delattr(self.stage, name)

    def _run(self, name: str, method: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
        flip, first = self.flip, name not in self._ran
        if number != self.microbatch:
            return method(number, *args, **kwargs)
        self._ran.add(name)
        if flip is None:
            with _FlippedResult() as counted:
                result = method(number, *args, **kwargs)
            self.counts.setdefault(name, counted.count)
            return result
        if flip.where == "weights" and name == "forward" and first:
            weights = [each for each in self.stage.module.parameters() if each.numel()]
            one = weights[flip.nth % len(weights)]
            flip_bit(one, flip.element, flip.bit)
            result = method(number, *args, **kwargs)
            if not flip.lasting:
                flip_bit(one, flip.element, flip.bit)
            return result
        if name != flip.where or not (first or flip.lasting):
            return method(number, *args, **kwargs)
        with _FlippedResult(flip, flip.nth % self.counts[name]):
            return method(number, *args, **kwargs)


class Setting(NamedTuple):
    """A training that is audited. replicas: of the mesh. dropout, width: of the model. length: tokens of a row."""

    schedule: str
    ranks: int
    microbatches: int
    replicas: int = 1
    dropout: float = 0.1
    width: int = 32
    length: int = 8

    def model(self, stages: int) -> GPT:
        """A model with a block for each stage."""
        sizes = {"width": self.width, "context": max(64, self.length), "dropout": self.dropout}
        return GPT(GPTConfig(heads=2, blocks=stages, vocab=32, **sizes))

    def pipeline(self, folder: str, *, in_process: bool = True, tell: bool = False) -> tuple[Pipeline, Tensor, Tensor]:
        """The pipeline, with batch and targets. folder: of evidence. tell: print verdicts, and go on."""
        program = compile_schedule(self.schedule, P=self.ranks, M=self.microbatches)
        torch.manual_seed(0)
        model = self.model(program.stages)
        rows = self.microbatches * (self.replicas if in_process else 1)
        batch, targets = torch.randint(0, 32, (rows, self.length)), torch.randint(0, 32, (rows, self.length))
        audit = Audit(folder=folder, on_fault="tell" if tell else "stop")
        pipe = Pipeline(
            model, program, loss_fn=next_token_loss, in_process=in_process, example=batch,
            mesh=Mesh(self.ranks, data=self.replicas), check_finite=False, audit=audit,
        )  # fmt: skip
        return pipe, batch, targets


class Outcome(NamedTuple):
    """What came of a flip.

    changed: whether the suspect sent or added other bits. kind, ranks: of the verdict; empty where all was equal.
    """

    changed: bool
    suspect: str
    kind: str = ""
    ranks: Sequence[str] = ()

    @property
    def named(self) -> bool:
        """Whether the suspect alone was named."""
        return self.kind in NAMING and list(self.ranks) == [self.suspect]


def watch_of(pipe: Pipeline) -> AuditWatch:
    """The audit of a pipeline."""
    (watch,) = (each for each in pipe._runner.watches if isinstance(each, AuditWatch))
    return watch


SETTINGS = (
    Setting("1f1b", 4, 4),
    Setting("zbh1", 3, 4),
    Setting("dualpipe", 4, 8),
    Setting("zbv", 3, 6),
    Setting("1f1b", 2, 4, replicas=2),
    Setting("dualpipev", 2, 4, replicas=2, dropout=0.0),
)


def drawn_flip(draw: random.Random, counts: dict[str, int]) -> Flip:
    """A flip anywhere in what a stage computes. counts: results by method."""
    where = draw.choice([*counts, "weights"])
    return Flip(where, draw.randrange(1 << 20), draw.randrange(1 << 30), draw.randrange(32), draw.random() < 0.5)


class FlipRuns:
    """Steps of a training without updates, in which bits flip. in_process: run all ranks in this process."""

    def __init__(self, setting: Setting, folder: str, seed: int, *, in_process: bool = True) -> None:
        self.pipe, self.batch, self.targets = setting.pipeline(folder, in_process=in_process)
        self.watch, self._draw = watch_of(self.pipe), random.Random(seed)
        self._weights = [(each, each.detach().clone()) for each in self.pipe.parameters()]

    def step(self, number: int, stage: FaultyStage | None) -> tuple[dict[str, str], AuditVerdict | None]:
        """The digests of the suspect in a step, and the verdict."""
        self.pipe.steps, verdict = number, None
        self.pipe.zero_grad()
        with stage or nullcontext():
            try:
                self.pipe.step(self.batch, self.targets)
            except WrongBits:
                verdict = self.watch.verdicts.pop()
        assert self.watch.trial is not None
        for parameter, values in self._weights:
            parameter.data.copy_(values)
        return dict(self.watch.trial.told["first"]), verdict

    def outcomes(self, number: int, count: int) -> Iterator[Outcome]:
        """The outcomes of so many flips in the microbatch that is audited in a step."""
        case = self.watch.table.case(number)
        assert case is not None
        held = self.pipe._assembly.stages.get(case.suspect)
        quiet = None if held is None else FaultyStage(held[case.stage], case.microbatch)
        healthy, verdict = self.step(number, quiet)
        assert verdict is None
        for _ in range(count):
            faulty = None
            if quiet is not None:
                flip = drawn_flip(self._draw, quiet.counts)
                faulty = FaultyStage(quiet.stage, case.microbatch, flip, quiet.counts)
            told, verdict = self.step(number, faulty)
            facts = () if verdict is None else (str(verdict.kind), verdict.ranks)
            yield Outcome(told != healthy, self.pipe.mesh.name(case.suspect), *facts)


def flips(
    setting: Setting, count: int, folder: str, seed: int = 0, *, in_process: bool = True, per_case: int = 8
) -> list[Outcome]:
    """The outcomes of so many flips in one training."""
    runs, outcomes, number = FlipRuns(setting, folder, seed, in_process=in_process), list[Outcome](), 0
    while len(outcomes) < count:
        outcomes += runs.outcomes(number, min(per_case, count - len(outcomes)))
        number += 1
    runs.pipe.close()
    return outcomes


def flips_on_ranks(rank: int, world_size: int, count: int, folder: str) -> list[Outcome]:
    """As `flips`, on processes: one copy of each stage, two copies, and replicas."""
    settings = Setting("1f1b", 4, 4), Setting("dualpipe", 4, 8), Setting("zbh1", 2, 4, replicas=2)
    parts = [(count + number) // len(settings) for number in range(len(settings))]
    each = (
        flips(setting, part, folder, seed=10 * number + rank, in_process=False, per_case=3)
        for number, (setting, part) in enumerate(zip(settings, parts, strict=True))
    )
    return [outcome for of_setting in each for outcome in of_setting]


def healthy_verdicts(setting: Setting, count: int, folder: str) -> int:
    """The number of verdicts on so many audited steps of a training with AdamW, without any flip."""
    pipe, batch, targets = setting.pipeline(folder, tell=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    watch = watch_of(pipe)
    for _ in range(count):
        pipe.step(batch, targets)
        optimizer.step()
        optimizer.zero_grad()
    audited = watch.audited
    assert audited == count, audited
    pipe.close()
    return len(watch.verdicts) + len(watch.off)


def share_of_audit(setting: Setting, folder: str, steps: int = 24) -> float:
    """Processor time of the audit over that of its steps, as a multiple of 1 / (P M)."""
    pipe, batch, targets = setting.pipeline(folder)
    watch = watch_of(pipe)
    for number in range(steps + 4):
        if number == 4:
            watch.spent = watch.stepped = 0
        pipe.step(batch, targets)
        pipe.zero_grad()
    pipe.close()
    return watch.spent / watch.stepped * setting.ranks * setting.microbatches * setting.replicas
