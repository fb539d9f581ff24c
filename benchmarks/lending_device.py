"""An emulated device whose lent experts take their time among the exchanges; for `hot_experts` and `waterfall`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from schedc.cell.program import Half
from schedc_runtime.measure.emulated_device import Device, ExchangeKey, Started
from schedc_runtime.moe.step_lender import StepLender


class LendingDevice(Device):
    """A device whose weights and gradients of lent experts travel in one queue of its exchanges."""

    def lent_queue(self, lender: Any) -> str:
        """The queue of their transfers."""
        raise NotImplementedError

    def lent_seconds(self, lender: Any) -> tuple[float, float]:
        """Seconds that the weights of the copies of a step take, and their gradients."""
        raise NotImplementedError

    def carries(self, lender: StepLender, stage: int, layer: int) -> None:
        """Let weights and gradients of a layer's copies take their time in the queue."""
        start, borrowed, give_back, take_back = lender.start, lender.borrowed, lender.give_back, lender.take_back
        out, back = (stage, -1, layer, Half.FORWARD), (stage, -1, layer, Half.BACKWARD)

        def started() -> None:
            new = bool(lender.held) and lender._travelling is None
            start()
            if new:
                self._queue(lender, out, self.lent_seconds(lender)[0])

        def joined() -> tuple[Tensor, ...]:
            slots = borrowed()
            self._arrived(lender, out)
            return slots

        def given() -> list[Any]:
            if exchanges := give_back():
                self._queue(lender, back, self.lent_seconds(lender)[1])
            return exchanges

        def taken(returned: Sequence[Any]) -> None:
            take_back(returned)
            self._arrived(lender, back)

        lender.start, lender.give_back, lender.take_back = started, given, taken  # type: ignore[method-assign]
        lender.experts.lent = joined

    def _arrived(self, lender: StepLender, key: ExchangeKey) -> None:
        queue = self.lent_queue(lender)
        if key in self.queued[queue] or key in self.due:
            self.clock = max(self.clock, self.carried(queue, key).end)

    def _queue(self, lender: StepLender, key: ExchangeKey, time: float) -> None:
        assert self.starts is not None
        mesh = self.starts.mesh
        sharing = tuple(mesh.sharing(mesh.coordinate(self.starts.process)))
        channel, group = "expert", lender.group
        if lender.peers.size < group.size:
            first = group.rank - group.position
            sharing, channel = sharing[first : first + group.per_node], "lane node"
        ticket = self.starts.post_among(sharing, channel, self.clock, time)
        self.queued[self.lent_queue(lender)][key] = Started(self.clock, time, ticket)
