"""Takes down what goes into and out of one microbatch on one stage while a step runs, without a copy.

    value              slot of the program                   who has it
    input              activation of the stage before        the rank before (made), the suspect (got)
    activation         activation of the stage               the suspect (made), the rank behind (got)
    output gradient    gradient of the stage behind          the rank behind (made), the suspect (got)
    input gradient     gradient of the stage                 the suspect (made), the rank before (got)

Beside these four a suspect takes down the loss, and gradients of parameters that are one microbatch's own. They are its
own where the parameter had no gradient before the first weight gradients of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import process_time_ns
from typing import Any, NamedTuple

from torch import Tensor, nn

from schedc.ir.ops import FACTS, OpKind
from schedc.ir.program import Channel
from schedc_runtime.audit.choice import AuditCase
from schedc_runtime.audit.digests import Digests, checks_of, tensor_digest
from schedc_runtime.execute.code import Handler
from schedc_runtime.execute.executor import Executor
from schedc_runtime.stage.stage import Stage

INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT, LOSS = (
    "input", "activation", "output gradient", "input gradient", "loss",
)  # fmt: skip


def gradient_of(name: str) -> str:
    """The name of the digest of a parameter's gradient."""
    return f"gradient of `{name}`"


def weights_of(stage: Stage) -> dict[str, Tensor]:
    """Parameters and buffers [...] of a stage by their names in its module, each tensor once."""
    module = stage.module
    return {name: each.detach() for name, each in (*module.named_parameters(), *module.named_buffers())}


class ValueKey(NamedTuple):
    """What a stage produces for a microbatch, as slots are named. maker: the stage."""

    channel: int
    maker: int
    microbatch: int


def audited_values(case: AuditCase) -> dict[str, ValueKey]:
    """The four values of a case by name."""
    stage, number = case.stage, case.microbatch
    return {
        INPUT: ValueKey(Channel.ACTIVATION, stage - 1, number),
        OUTPUT: ValueKey(Channel.ACTIVATION, stage, number),
        OUTPUT_GRADIENT: ValueKey(Channel.GRADIENT, stage + 1, number),
        INPUT_GRADIENT: ValueKey(Channel.GRADIENT, stage, number),
    }


class _WatchedSlots(list[Any]):
    """The values of a rank's slots. watchers: called with what is put into a slot."""

    def __init__(self, values: list[Any], watchers: Mapping[int, Callable[[Any], None]]) -> None:
        super().__init__(values)
        self._watchers = watchers

    def __setitem__(self, index: Any, value: Any) -> None:
        if value is not None and index in self._watchers:
            self._watchers[index](value)
        super().__setitem__(index, value)


class StepCapture:
    """The digests that a place takes in a step. It begins before the first instruction, and ends with `end`.

    stage: the stage of the case where the place is the suspect, else None. shared: ids of parameters of the stage that
    other stages here use, too. Digests are taken when a value arrives or is formed.
    """

    def __init__(self, executor: Executor, case: AuditCase, stage: Stage | None, shared: set[int]) -> None:
        self._executor, self._case, self._stage = executor, case, stage
        self.digests: Digests = {}
        """By the name of a value."""
        self.weights: Digests = {}
        """The crc32 of each weight of the suspect's stage before the step, by name."""
        self.tensors: dict[str, tuple[Tensor, ...]] = {}
        """What the suspect was given: `INPUT` and `OUTPUT_GRADIENT`."""
        self._kept: list[tuple[int, Any]] = []
        self.spent = 0
        """Nanoseconds of processor time for digests."""
        registers, slots = executor.registers, executor.code.slots
        watchers: dict[int, Callable[[Any], None]] = {}
        for name, key in audited_values(case).items():
            if (slot := slots.get((key.channel, key.maker, key.microbatch))) is not None:
                watchers[slot] = self._taking(name)
                if (value := registers.values[slot]) is not None:
                    watchers[slot](value)
        registers.values = _WatchedSlots(registers.values, watchers)
        if stage is not None:
            self.target = registers.targets[case.microbatch]
            self.loss_scale = registers.loss_scale
            named = stage.module.named_parameters()
            self._parameters = {name: each for name, each in named if id(each) not in shared}
            self.weights = checks_of(weights_of(stage))
            self._hook_rows(stage)

    def end(self) -> None:
        """Leave the executor as it was. It may be called twice."""
        calls, steps = self._executor.code.calls, self._executor.code.steps
        for position, handler in self._kept:
            calls[position] = (handler, calls[position][1])
            steps[position] = steps[position]._replace(handler=handler)
        self._kept = []
        self._executor.altered = False

    def now(self) -> Digests:
        """The digests of what the suspect was given, as it lies in memory now."""
        return {name: tensor_digest(tensors) for name, tensors in self.tensors.items()}

    def _taking(self, name: str) -> Callable[[Any], None]:
        def take(value: Any) -> None:
            begin = process_time_ns()
            self.digests[name] = tensor_digest(value)
            self.spent += process_time_ns() - begin
            if self._stage is not None and name in (INPUT, OUTPUT_GRADIENT):
                self.tensors[name] = tuple(value)

        return take

    def _hook_rows(self, stage: Stage) -> None:
        """Look at the loss behind the forward, and at gradients around backwards up to the first weight gradients."""
        number, index = self._case.microbatch, self._case.stage
        for _, last, ops in _rows(self._executor):
            kinds = {kind: each for kind, at, each in ops if at == index}
            if kinds.get(OpKind.F) == number and stage.loss_fn is not None:
                self._hook(last, None, lambda: self._take_loss(stage))
        empty: list[str] = []

        def before() -> None:
            empty[:] = [name for name, each in self._parameters.items() if each.grad is None]

        for first, last, ops in _rows(self._executor):
            changes = [(kind, each) for kind, at, each in ops if at == index and kind in (OpKind.I, OpKind.W, OpKind.B)]
            for kind, each in changes:
                own = each == number
                self._hook(first, before, None)
                self._hook(last, None, (lambda: self._take_gradients(empty)) if own else None)
                if FACTS[kind].weight:
                    return

    def _take_loss(self, stage: Stage) -> None:
        self.digests[LOSS] = tensor_digest([stage.losses[self._case.microbatch]])

    def _take_gradients(self, names: list[str]) -> None:
        begin = process_time_ns()
        self.digests |= gradient_digests({name: self._parameters[name] for name in names})
        self.spent += process_time_ns() - begin

    def _hook(self, position: int, before: Callable[[], None] | None, after: Callable[[], None] | None) -> None:
        """Let a step of the executor run something before it or behind it."""
        code = self._executor.code
        handler, operands = code.calls[position]
        self._kept.insert(0, (position, handler))
        self._executor.altered = True
        hooked = _hooked(handler, before, after)
        code.calls[position] = (hooked, operands)
        code.steps[position] = code.steps[position]._replace(handler=hooked)


def gradient_digests(parameters: Mapping[str, nn.Parameter]) -> Digests:
    """The digest of each gradient that is there, by `gradient_of`."""
    return {gradient_of(name): tensor_digest([each.grad]) for name, each in parameters.items() if each.grad is not None}


def _hooked(handler: Handler, before: Callable[[], None] | None, after: Callable[[], None] | None) -> Handler:
    def run(registers: Any, operands: Any) -> bool | None:
        if before is not None:
            before()
        blocked = handler(registers, operands)
        if after is not None and not blocked:
            after()
        return blocked

    return run


def _rows(executor: Executor) -> Iterator[tuple[int, int, tuple[tuple[OpKind, int, int], ...]]]:
    """The compute instructions of a stream: positions of the first and the last step, and the ops."""
    steps = executor.code.steps
    ends = {step.row: at for at, step in enumerate(steps)}
    seen: set[int] = set()
    for position, step in enumerate(steps):
        if step.instruction.computes and step.row not in seen:
            seen.add(step.row)
            yield position, ends[step.row], step.instruction.ops
