"""Decides how a batch is recorded: with its sizes as they are, or with symbols where batches of its form differ.

    tokens [4, 65]    recorded as it is; a model that sees one size pays for nothing else
    tokens [4, 66]    recorded with a symbol for the length, and compared with the first recording
    tokens [4, 67]    what follows from 67 is put into the second recording, if this holds for 67

Every rank sees the same batches, and therefore decides alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from schedc_runtime.partition.cut_record import CutModel
from schedc_runtime.partition.record import Description, equal
from schedc_runtime.partition.recorder import Recording
from schedc_runtime.partition.symbols import Places, Sizes, Values, differing_sizes, settled

_ATTEMPTS = 3
"""Recordings with symbols, one after the other, that no other batch could use: the model branches on its sizes."""
_KEPT = 8
"""Recordings with symbols kept for one form."""
Record = Callable[[Places], CutModel]
"""Records a batch, with symbols for its sizes at these places; none for sizes as they are."""


class PlainRecording(NamedTuple):
    """A recording of sizes as they are, with which those of symbols are compared."""

    sizes: Sizes
    description: Description


@dataclass
class Form:
    """What is known of batches that differ in sizes alone.

    seen: the sizes of one batch. varying: places of sizes that differed between batches. symbolic: recordings with
    symbols, the latest first. attempts: recordings with symbols since one could be used again.
    """

    seen: Sizes | None = None
    varying: Places = frozenset()
    symbolic: list[CutModel] = field(default_factory=list)
    reference: PlainRecording | None = None
    attempts: int = 0

    def model(self, sizes: Sizes, record: Callable[[Places], CutModel]) -> tuple[CutModel, Values]:
        """The recording to use for a batch of these sizes, and what its symbols are there. record: makes a new one."""
        for known in self.symbolic:
            if (values := _values(known, sizes)) is not None:
                self.attempts = 0
                return known, values
        self._see(sizes)
        symbolic = self._with_symbols(record)
        if symbolic is not None and self._agrees(symbolic):
            return self._keep(symbolic, sizes)
        plain = record(frozenset())
        self.reference = PlainRecording(sizes, plain.recording.description)
        if symbolic is not None and self._agrees(symbolic):  # the first reference was none for it
            self._keep(symbolic, sizes)
        return plain, {}

    def begin(self, sizes: Sizes, recording: Recording) -> None:
        """Note the first recording of the model, which was made before there was a form."""
        self._see(sizes)
        self.reference = PlainRecording(sizes, recording.description)

    def _see(self, sizes: Sizes) -> None:
        self.seen = self.seen or sizes
        self.varying |= differing_sizes(self.seen, sizes)

    def _with_symbols(self, record: Callable[[Places], CutModel]) -> CutModel | None:
        """A recording with symbols; None where no size varies, after `_ATTEMPTS` attempts, or if recording fails."""
        if not self.varying or self.attempts == _ATTEMPTS:
            return None
        self.attempts += 1
        try:
            return record(self.varying)
        except Exception:
            return None

    def _agrees(self, symbolic: CutModel) -> bool:
        """Whether a recording's conditions admit the sizes of the reference, and its description is equal there."""
        if self.reference is None or (values := _values(symbolic, self.reference.sizes)) is None:
            return False
        return equal(settled(symbolic.recording.description, values), self.reference.description)

    def _keep(self, symbolic: CutModel, sizes: Sizes) -> tuple[CutModel, Values]:
        self.symbolic = [symbolic, *self.symbolic[: _KEPT - 1]]
        values = _values(symbolic, sizes)
        assert values is not None
        return symbolic, values


def _values(symbolic: CutModel, sizes: Sizes) -> Values | None:
    conditions = symbolic.recording.conditions
    return None if conditions is None else conditions.values(sizes)
