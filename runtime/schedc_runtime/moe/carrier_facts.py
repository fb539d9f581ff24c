"""Facts of a carrier of rows: its bits, its streams and SMs, and whether a graph of launches can hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schedc_runtime.providers import Bits


@dataclass(frozen=True)
class CarrierFacts:
    """The properties of a transport of rows.

    sums: the order in which the results of a token's experts are added.
    static: shapes follow from the batch alone, and hold the most rows that any routing brings.
    aligned: the end of each expert's rows is a multiple of this; rows of zeros fill the gap.
    streams: names of the streams that carry rows; empty where compute's stream does.
    sms: multiprocessors that an exchange takes from compute; None where nobody knows.
    asks: calls for which the host waits for the device.
    """

    sums: str
    bits: Bits = "own"
    static: bool = False
    aligned: int = 1
    streams: tuple[str, ...] = ()
    sms: int | None = None
    asks: tuple[Literal["plan", "dispatch", "combine"], ...] = ()

    def why_not_captured(self) -> str:
        """Why a graph of launches cannot hold the exchanges; empty where it can."""
        if self.asks:
            return f"the host waits for the device in {' and '.join(self.asks)}"
        return "" if self.static else "shapes follow the routing"

    def told(self) -> str:
        """The facts as a report tells them."""
        bits = "the loop's bits" if self.bits == "loop" else "its own order of sums (compare by tolerance)"
        beside = f"beside compute on {', '.join(self.streams)}" if self.streams else "on compute's stream"
        taken = "" if self.sms is None else f", {self.sms} SMs"
        captured = self.why_not_captured()
        return f"{bits}: {self.sums}; {beside}{taken}; {f'no graphs: {captured}' if captured else 'graphs'}"
