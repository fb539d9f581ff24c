"""The machines that a plan is searched for: accelerators, and the levels of the network between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.planner.reading.keys import place_of
from schedc.source import NOWHERE, Source

PRECISIONS = ("bf16", "fp16", "fp8", "fp4")
"""The types of products that a peak is given for."""


@dataclass(frozen=True)
class Accelerator:
    """A device of a cluster.

    peak: FLOP/s of dense products, by precision. sms: units that run blocks of threads (SMs, CUs, AI cores). hbm_bytes:
    bytes of its memory. hbm_Bps: bytes per second of that. usable: share of it that tensors can use, after context and
    fragmentation. host_Bps: bytes per second to host memory, in one direction; 0 where the file does not say it.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    sms: int
    hbm_bytes: int
    hbm_Bps: float
    usable: float
    host_Bps: float = 0.0

    @property
    def usable_bytes(self) -> float:
        """Bytes of memory that tensors can use."""
        return self.hbm_bytes * self.usable


@dataclass(frozen=True)
class NetworkLevel:
    """A level of the network: ``size`` devices reach each other over it.

    alpha_s: seconds until the first byte of a message arrives. Bps: bytes per second in one direction, of one NIC where
    a node shares ``nics`` of them, else of one device. nics: NICs of a node; 0 where each device has links of its own.
    oversubscription: bytes per second into the level over what it carries when all devices send; 1 for all of it.
    rails: whether NICs connect equal places of domains only; bytes for another place take a link of the domain first.
    """

    name: str
    size: int
    alpha_s: float
    Bps: float
    nics: int = 0
    oversubscription: float = 1.0
    rails: bool = False


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes.

    per_node: devices of a node, with common NICs. levels: innermost first; the last one reaches all devices.
    fit: name of the constants that were fitted to it; empty for none. alike: name of the device of the fit's rows whose
    constants are borrowed; empty where the fit has rows of this device. source: the text of the cluster.
    """

    name: str
    devices: int
    per_node: int
    device: Accelerator
    levels: tuple[NetworkLevel, ...]
    fit: str = ""
    alike: str = field(default="", kw_only=True)
    source: Source | None = field(default=None, compare=False, repr=False)

    def level_over(self, devices: int) -> NetworkLevel:
        """The innermost level that reaches so many neighbours. Groups start at multiples of their size."""
        return next((level for level in self.levels if level.size >= devices), self.levels[-1])

    def device_Bps(self, level: NetworkLevel) -> float:
        """Bytes per second and direction of a device when all devices of its node send over a level."""
        shared = level.nics / self.per_node if level.nics else 1.0
        return level.Bps * shared / level.oversubscription

    def peak(self, precision: str) -> float:
        """FLOP/s of one device. Raises `DiagnosticError` (S708) where the file has no peak for the precision."""
        if precision in self.device.peak:
            return self.device.peak[precision]
        message = f"`{self.name}` has no peak for {precision}"
        known = ", ".join(self.device.peak)
        span = place_of(self.source, "peak", "device") if self.source else NOWHERE
        help = f"add `{precision}` to `peak`, in FLOP/s, or ask for one of: {known}"
        raise DiagnosticError([Diagnostic("S708", message, Label(span), help=help, source=self.source)])
