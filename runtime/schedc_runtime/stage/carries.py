"""What segments of a sequence leave on a stage for the segments behind them: keys and values, and back their gradients.

    F of segment 0    | K0 |    |    |    the row of a layer has room for the whole sequence
    F of segment 1    | K0 | K1 |    |    and attends to all that is there
    F of segment 2    | K0 | K1 | K2 |
    B of segment 2    | dK0 | dK1 |       dK2 goes on, and what earlier segments get waits
    B of segment 1    | dK0 |             its own dK1 and the one that waited, added in this order

Nothing of it is a message: all segments of a microbatch meet on each stage. The order of a program is such that
forwards take segments from first to last, backwards from last to first (Seq1F1B, arXiv 2406.03488). Sums of gradients
then have one order, whatever runs between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.errors import StageError
from schedc_runtime.recompute.regions import keep

SLOT = "carry_slot"
"""The name of the attribute by which an attention finds what its stage carries."""


class CarrySlot:
    """Where an attention finds the `Carries` of its stage. path: the attention's, for keys. plain: attends.

    boolean: whether ``plain`` takes masks of truth values. latent: whether keys and values are made of all latents.
    """

    carries: Carries | None = None

    def __init__(self, path: str, plain: Any, *, boolean: bool, latent: bool = False) -> None:
        self.path, self.plain, self.boolean, self.latent = path, plain, boolean, latent

    @property
    def running(self) -> Carries | None:
        """What is carried, while a stage runs; None while a model is recorded, or called by itself."""
        carries = self.carries
        return None if carries is None or carries.number is None else carries


class _CarriedRow:
    """Keys, values or the like [..., S, ...] of a sequence in a layer.

    key: (sequence, name). left: the segment whose backward ran last.
    """

    def __init__(self, key: tuple[int, str], own: Tensor, dim: int, segments: int) -> None:
        shape = list(own.shape)
        shape[dim] *= segments
        self.whole = torch.empty(shape, dtype=own.dtype, device=own.device)
        self.key, self.dim, self.there, self.left = key, dim, 0, segments
        self.waiting: Tensor | None = None
        """The gradients of the tokens in front of segment `left`, from that one and those behind it."""


class Carries:
    """Keys and values that segments of sequences leave on a stage for those behind them.

    segments: of each sequence. index: the stage's number, for messages. number: the microbatch of the order that runs;
    segment j of sequence m is m * segments + j. None while nothing runs.
    """

    def __init__(self, index: int, segments: int) -> None:
        self.index, self.segments = index, segments
        self.number: int | None = None
        self.masks: dict[Any, Tensor] = {}
        """The masks of the microbatch that runs, which all layers share."""
        self._rows: dict[tuple[int, str], _CarriedRow] = {}

    def begin(self, number: int) -> None:
        """A microbatch of the order runs from here on."""
        if number != self.number:
            self.number, self.masks = number, {}

    @property
    def held_bytes(self) -> int:
        """Bytes of keys, values and the like that are there, and of gradients that wait."""
        held = [row.whole for row in self._rows.values()]
        held += [row.waiting for row in self._rows.values() if row.waiting is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def end(self) -> None:
        """Nothing runs any more. Raises `StageError` if something still waits for a segment."""
        if self._rows:
            sequences = sorted({sequence for sequence, _ in self._rows})
            raise StageError(f"stage {self.index} still holds keys and values of the sequences {sequences}")
        self.reset()

    def reset(self) -> None:
        """Forget all, after a step that failed."""
        self._rows, self.number, self.masks = {}, None, {}

    def joined(self, name: str, own: Tensor, dim: int) -> Tensor:
        """[..., tokens so far, ...] of the sequence that runs, of which ``own`` [..., own, ...] are the last.

        name: the same for all segments, and no other's on this stage. dim: the dimension of tokens. A recomputation
        joins what its first run has joined: the row is as it was, and later segments lie behind.
        """
        return self._join(own, *keep(self._arrived, name, own, dim))

    def joined_once(self, name: str, own: Tensor, dim: int) -> Tensor:
        """[..., tokens so far, ...] of own tokens [..., own, ...], as `joined`, where no recomputation comes."""
        return self._join(own, *self._arrived(name, own, dim))

    def _join(self, own: Tensor, row: _CarriedRow, segment: int) -> Tensor:
        joined: Tensor = _Join.apply(own, row, segment, self)  # type: ignore[no-untyped-call]
        if not joined.requires_grad and row.there == self.segments:
            self._rows.pop(row.key, None)
        return joined

    def _arrived(self, name: str, own: Tensor, dim: int) -> tuple[_CarriedRow, int]:
        """The row that takes the segment which runs, and the segment's number."""
        assert self.number is not None
        sequence, segment = divmod(self.number, self.segments)
        key = sequence, name
        if (row := self._rows.get(key)) is None:
            row = self._rows[key] = _CarriedRow(key, own, dim, self.segments)
        if segment != row.there or row.left != self.segments:
            raise StageError(
                f"stage {self.index}: segment {segment} of sequence {sequence} is forwarded, and {row.there} are there",
                "forwards take the segments of a sequence from first to last, before the backward of any",
            )
        row.there += 1
        return row, segment

    def leave(self, row: _CarriedRow, segment: int, grad: Tensor) -> Tensor:
        """[..., own, ...] the gradient of a segment's own tokens.

        grad: [..., tokens so far, ...] that of all which the segment has joined.
        """
        if row.left != segment + 1:
            raise StageError(
                f"stage {self.index}: the backward of segment {segment} of sequence {row.key[0]} runs before that of"
                f" segment {segment + 1}",
                "backwards take the segments of a sequence from last to first",
            )
        own, past = grad.shape[row.dim] // (segment + 1), grad.shape[row.dim] * segment // (segment + 1)
        mine, before = grad.narrow(row.dim, past, own), grad.narrow(row.dim, 0, past)
        row.left = segment
        if row.waiting is None:
            row.waiting = before.clone() if segment else None
        else:
            mine = mine + row.waiting.narrow(row.dim, past, own)
            row.waiting = row.waiting.narrow(row.dim, 0, past).add_(before)
        if not segment:
            del self._rows[row.key]
        return mine


class _Join(torch.autograd.Function):
    """(own tokens, ...) -> all tokens so far, in the memory of the row: nothing that is there is copied.

    Each result has a counter of versions of its own (``.data``). Later segments write behind its tokens.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, row: _CarriedRow, segment: int, carries: Carries) -> Tensor:
        ctx.rest = row, segment, carries
        tokens = own.shape[row.dim]
        row.whole.data.narrow(row.dim, segment * tokens, tokens).copy_(own)
        return row.whole.data.narrow(row.dim, 0, (segment + 1) * tokens).data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        row, segment, carries = ctx.rest
        return carries.leave(row, segment, grad), None, None, None


def slots_in(module: nn.Module) -> list[CarrySlot]:
    """The slots of the attentions in ``module``."""
    return [slot for part in module.modules() if (slot := vars(part).get(SLOT)) is not None]


def carries_of(module: nn.Module, index: int, segments: int) -> Carries | None:
    """The carries of stage ``index``, which its attentions get; None for whole sequences, or without attentions."""
    slots = slots_in(module) if segments > 1 else []
    if not slots:
        return None
    carries = Carries(index, segments)
    for slot in slots:
        slot.carries = carries
    return carries
