"""Messages and collectives between ranks: over torch.distributed, or between all ranks of one process."""

from schedc_runtime.transport.base import (
    Handle,
    MessageMismatch,
    Spec,
    Transfer,
    Transport,
    TransportError,
    check_tensors,
)
from schedc_runtime.transport.distributed import TorchTransport
from schedc_runtime.transport.in_process import InProcessNetwork, InProcessTransport

__all__ = [
    "Handle",
    "InProcessNetwork",
    "InProcessTransport",
    "MessageMismatch",
    "Spec",
    "TorchTransport",
    "Transfer",
    "Transport",
    "TransportError",
    "check_tensors",
]
