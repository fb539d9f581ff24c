"""Errors of the runtime: what it refuses and what stops a step, each with help where something helps."""

from __future__ import annotations


class RuntimeFault(Exception):
    """The model, the batch or the machine cannot be run as asked.

    message: what is wrong, with modules, stages and shapes. help: what to do; "" if nothing is known to help.
    """

    def __init__(self, message: str, help: str = "") -> None:
        self.message, self.help = message, help
        super().__init__(f"{message}\n  = help: {help}" if help else message)


class PartitionError(RuntimeFault):
    """The model cannot be cut into the stages asked for."""


class PlanMismatch(RuntimeFault):
    """The plan says other sizes than the model or its first batch has. Every rank raises the same."""


class RanksDisagree(RuntimeFault):
    """Ranks differ in what they must have alike before a step: modes, settings, batches, copies of parameters.

    Every rank raises the same, before the first message. The pipeline stays usable.
    """


class GraphRefused(RuntimeFault):
    """A graph cannot hold the step, and the text says what. Every rank raises the same behind a step that has run."""


class BoundaryError(RuntimeFault):
    """The tensors between two stages cannot be inferred in advance, or differ from the inferred ones."""


class StageError(RuntimeFault):
    """A stage cannot do what was asked in its present state."""


class MaterializeError(RuntimeFault):
    """A model on the meta device cannot be given its values, or has none yet."""


_SPOILT = "this step's gradients are spoilt: zero them before the next step"


class NonFiniteStep(RuntimeFault):
    """A training step gave NaN or infinite values. Every rank raises the same, before the trainer's update."""


class NonFiniteLoss(NonFiniteStep):
    """The loss is NaN or infinite. microbatch, stage: the first with such a value.

    ``stage`` counts stages; their number ``stages`` itself means the loss function.
    """

    def __init__(self, loss: float, microbatch: int, stage: int, stages: int) -> None:
        self.microbatch, self.stage = microbatch, min(stage, stages - 1)
        where = f"stage {stage} was the first to produce a value that is not finite, for microbatch {microbatch}"
        if stage == stages:
            where = f"all stages produced finite values; the loss function did not, for microbatch {microbatch}"
        super().__init__(
            f"the loss is {loss}: {where}",
            _SPOILT,
        )


class NonFiniteGradients(NonFiniteStep):
    """The loss is finite, and gradients are not. stage: the last with such gradients. names: of their parameters.

    The backward goes through the last stage first, so the others may have got it from there.
    """

    def __init__(self, message: str, stage: int, names: list[str]) -> None:
        self.stage, self.names = stage, names
        super().__init__(
            message,
            f"{_SPOILT}; a trainer that skips such updates itself, as with a gradient scaler whose scale is 1, gives"
            ' Pipeline(check_finite="loss")',
        )


class WrongBits(RuntimeFault):
    """A repeated microbatch had other bits than the first time. Every rank raises the same, behind the step.

    ranks: names of who is accused: the rank that computes wrongly, both ends of a link, or the two that differ.
    proved: the number of training steps that the accused are known to have computed rightly.
    """

    def __init__(self, message: str, help: str, ranks: tuple[str, ...], proved: int) -> None:
        self.ranks, self.proved = ranks, proved
        super().__init__(message, help)


class PeerFailure(RuntimeFault):
    """This rank stopped because another rank failed or died, or because its connection broke.

    rank: name of the other rank; "" if unknown. The message holds the other rank's error, or how its process ended.
    """

    def __init__(self, rank: str, message: str) -> None:
        self.rank = rank
        super().__init__(message)


class StepTimeout(RuntimeFault):
    """A rank waited too long. One rank's message lists where every rank stands; the other messages name that rank."""
