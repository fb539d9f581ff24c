"""Flips of bits inside a stage of a rank, and the verdicts of an audit: the cases of ``prove``."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Audit, Mesh, Pipeline, WrongBits
from schedc_runtime.audit.verdict import AuditVerdict
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
    """A training that is audited. replicas: of the mesh. dropout: of the model."""

    schedule: str
    ranks: int
    microbatches: int
    replicas: int = 1
    dropout: float = 0.1

    def model(self, stages: int) -> GPT:
        """A model with a block for each stage."""
        return GPT(GPTConfig(width=32, heads=2, blocks=stages, vocab=32, dropout=self.dropout))

    def pipeline(self, folder: str, every: int = 1) -> tuple[Pipeline, Tensor, Tensor]:
        """The pipeline in one process, with its batch and targets. folder: of evidence."""
        program = compile_schedule(self.schedule, P=self.ranks, M=self.microbatches)
        torch.manual_seed(0)
        model = self.model(program.stages)
        rows = self.microbatches * self.replicas
        batch, targets = torch.randint(0, 32, (rows, 8)), torch.randint(0, 32, (rows, 8))
        mesh = Mesh(self.ranks, data=self.replicas)
        pipe = Pipeline(
            model, program, loss_fn=next_token_loss, in_process=True, example=batch, mesh=mesh, check_finite=False,
            audit=Audit(folder=folder),
        )  # fmt: skip
        return pipe, batch, targets


class Outcome(NamedTuple):
    """What came of a flip. changed: whether the suspect sent or added other bits. verdict: None where all was equal."""

    changed: bool
    verdict: AuditVerdict | None
    suspect: str

    @property
    def named(self) -> bool:
        """Whether the suspect alone was named."""
        return self.verdict is not None and self.verdict.ranks == (self.suspect,) and self.verdict.names_one


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


def flips(setting: Setting, count: int, folder: str, seed: int = 0, per_case: int = 8) -> list[Outcome]:
    """The outcomes of so many flips in one training. Each hits the microbatch that is audited in its step."""
    pipe, batch, targets = setting.pipeline(folder)
    watch, draw, outcomes = watch_of(pipe), random.Random(seed), list[Outcome]()
    weights = [(each, each.detach().clone()) for each in pipe.parameters()]

    def step(number: int) -> dict[str, str]:
        pipe.steps = number
        pipe.zero_grad()
        pipe.step(batch, targets)
        assert watch.trial is not None
        return dict(watch.trial.told["first"])

    number = 0
    while len(outcomes) < count:
        case = watch.table.case(number)
        assert case is not None
        stage = pipe._assembly.stages[case.suspect][case.stage]
        with FaultyStage(stage, case.microbatch) as quiet:
            healthy = step(number)
        for _ in range(min(per_case, count - len(outcomes))):
            flip = drawn_flip(draw, quiet.counts)
            with FaultyStage(stage, case.microbatch, flip, quiet.counts):
                verdict = None
                try:
                    step(number)
                except WrongBits:
                    verdict = watch.verdicts.pop()
            assert watch.trial is not None
            changed = watch.trial.told["first"] != healthy
            outcomes.append(Outcome(changed, verdict, pipe.mesh.name(case.suspect)))
            with torch.no_grad():
                for parameter, values in weights:
                    parameter.data.copy_(values)
        number += 1
    pipe.close()
    return outcomes
