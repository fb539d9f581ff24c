"""Which image of a rank may be written over, where ranks have a state some steps after they began to copy it.

    safe    the newest step that all ranks and their neighbours hold: its image stays, here and at the neighbours
    under   the step that is copied, or goes to the neighbours; None if none does. No other state is copied meanwhile

What a rank sees of the step under way goes into the request of its next step, as `LACKS`. All ranks then do the same:

    0   every neighbour has it: it is the safe step, and the other image is free
    1   some neighbour has not got it yet: the state of this step is left out
    2   some rank does not have it itself: it is given up, and its image is free
"""

from __future__ import annotations

from collections.abc import Sequence

from schedc_runtime.keeper.images import Image
from schedc_runtime.keeper.places import Places

HELD, UNDER_WAY, ABSENT = 0, 1, 2


class BackedImages:
    """The rule for the two images of a rank. images: open, and the same list while it may grow its images anew.

    neighbours: whether a state is safe only with its copies there. Else it is safe when all ranks hold it.
    """

    def __init__(
        self, places: Places, images: Sequence[Image], safe: int | None = None, neighbours: bool = True
    ) -> None:
        self._places, self._images, self._neighbours = places, images, neighbours
        self.safe, self.under = safe, safe
        self.alone = 0
        """Number of states that counted as safe without a neighbour's copy, since it does not answer."""

    def lacks(self) -> int:
        """What this rank sees of the step under way."""
        if self.under is None:
            return HELD
        image = next((image for image in self._images if _step(image) == self.under), None)
        if image is None:
            return ABSENT
        if not self._neighbours or image.backed:
            return HELD
        watch = self._places.watch()
        if watch is not None and watch.trouble:
            self.alone += 1
            return HELD
        return UNDER_WAY

    def agreed(self, most: int) -> int | None:
        """The safe step behind a round of all ranks. most: the largest `lacks` of any rank."""
        if self.under is not None and most == HELD:
            self.safe = self.under
        if most != UNDER_WAY:
            self.under = None
        return self.safe

    def dropped(self, step: int) -> None:
        """Forget a state that has turned out to be useless, on all ranks."""
        self.under = None
        if self.safe == step:
            self.safe = max((held for image in self._images if (held := _step(image)) is not None), default=None)


def _step(image: Image) -> int | None:
    header = image.header()
    return None if header is None else header.step


def free_image(steps: Sequence[int | None], safe: int | None) -> int:
    """The number of the image to write over, by the steps that both hold: not that of ``safe``."""
    return int(steps[0] is not None and steps[0] == safe)
