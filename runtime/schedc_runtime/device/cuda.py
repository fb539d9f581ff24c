"""CUDA behind the seam: no other file of the runtime names CUDA, NCCL, pinned memory or streams of the allocator.

Events and streams are those of torch. What concerns the machine and no single GPU is a function.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedc_runtime.device.base import CAPABILITIES, CapturedCall, ComputeDevice

TYPE, BACKEND = "cuda", "nccl"
"""The type of devices that this file serves, and the backend of process groups between them."""

DISPATCH = "CUDA"
"""The key by which torch finds the implementation of an operation."""

GRAPH_BACKEND, GRAPH_OPTION = "cudagraphs", "triton.cudagraphs"
"""How torch.compile calls a backend of graphs, and an option of inductor."""

_NATIVE = (9, 10)
"""Major compute capabilities for which torch has grouped products, as its own check says; 8 and 12 are others."""
_SPIN = 1e-3
"""Seconds that the host asks for an event without a pause: it waits for sizes in the middle of a step."""
_LAST_RESORT = 60.0
"""Seconds between the end of torch's own limit and twice that of the runtime."""
_HIGH, _NORMAL = -1, 0
"""Priorities of a stream, as torch counts them."""


class GpuDevice(ComputeDevice):
    """A GPU of CUDA or ROCm."""

    least_copy = 1 << 20

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self._unpinned = ""
        """Why pinned memory could not be had; empty as long as it could."""
        self._lent: set[int] = set()
        """Addresses of host memory that others have allocated, and that is pinned now."""

    def stream(self, name: str, high: bool = False) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.where, priority=_HIGH if high else _NORMAL)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.where)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event: torch.cuda.Event = (stream or self.current()).record_event()
        return event

    def reached(self, event: torch.cuda.Event, seconds: float) -> bool:
        begin = time.monotonic()
        while not event.query():  # type: ignore[no-untyped-call]
            waited = time.monotonic() - begin
            if waited >= seconds:
                return False
            if waited > _SPIN:
                time.sleep(_SPIN / 10)
        return True

    def used_by(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def host_memory(self, count: int) -> Tensor:
        if not self._unpinned:
            try:
                return torch.empty(count, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._unpinned = str(error).splitlines()[0]
                _warn_unpinned(count, self._unpinned)
        return torch.empty(count, dtype=torch.uint8)

    def lend(self, memory: Tensor) -> None:
        error = int(_driver().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error:
            _warn_unpinned(memory.nbytes, f"cudaHostRegister gives the error {error}")
        else:
            self._lent.add(memory.data_ptr())

    def take_back(self, memory: Tensor) -> None:
        if memory.data_ptr() in self._lent:
            self._lent.remove(memory.data_ptr())
            _driver().cudaHostUnregister(memory.data_ptr())

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def supports(self, what: str) -> str:
        if what not in CAPABILITIES:
            raise KeyError(what)
        match what:
            case "pinned memory":
                return self._unpinned
            case "triton":
                low = torch.cuda.get_device_capability(self.where) < (8, 0)
                return f"{self.where.type}: these kernels need a GPU of compute capability 8.0" if low else ""
            case "grouped products" | "fp8 products":
                return self._not_native()
            case "masked groups":
                return "attention of groups with a mask has no fused kernel there"
        return ""

    def _not_native(self) -> str:
        """Why a GPU multiplies in groups by a loop of the host; empty where it has kernels for it."""
        if torch.version.hip:
            return "a GPU of ROCm"
        major, minor = torch.cuda.get_device_capability(self.where)
        if major in _NATIVE:
            return ""
        return f"a GPU of compute capability {major}.{minor}, and grouped products need 9 or 10"

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def captured(self, call: Callable[[], Any], pool: Any, stream: Any = None, *, whole: bool = False) -> CapturedCall:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that watches collectives, may call the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            results = call()
        return CapturedCall(graph.replay, results, False)

    def is_captured(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _warn_unpinned(count: int, why: str) -> None:
    warnings.warn(
        f"{count:,} bytes of pinned host memory cannot be had ({why}): copies use pageable memory, and the host waits"
        " for them; raise the limit of locked memory (ulimit -l), or move less",
        stacklevel=4,
    )


def own_device(local: int, processes: int) -> torch.device | None:
    """The GPU of one of ``processes`` on this machine, made its current one; None with fewer GPUs than processes."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < processes:
        return None
    device = torch.device(TYPE, local)
    torch.cuda.set_device(device)
    return device


def current_device() -> torch.device | None:
    """The current GPU of this process; None without one."""
    return torch.device(TYPE, torch.cuda.current_device()) if torch.cuda.is_available() else None


def available() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()


def name_of_device() -> str:
    """The name of the current GPU; empty without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def narrow_sums(dtype: torch.dtype, convolved: bool = False) -> tuple[bool, bool]:
    """Whether products may round operands of a type to TF32, and sums of it to their own type, as torch is set."""
    matmul = torch.backends.cuda.matmul
    tf32 = torch.backends.cudnn.allow_tf32 if convolved else matmul.allow_tf32
    settings = {
        torch.bfloat16: matmul.allow_bf16_reduced_precision_reduction,
        torch.float16: matmul.allow_fp16_reduced_precision_reduction,
    }
    return bool(dtype is torch.float32 and tf32), bool(settings.get(dtype, False))


@contextmanager
def wide_sums() -> Iterator[None]:
    """Let products and their sums keep the bits of their types: neither TF32 nor sums of 16 bits."""
    matmul, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before, convolved = [getattr(matmul, name) for name in names], convolutions.allow_tf32
    try:
        convolutions.allow_tf32 = False
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        convolutions.allow_tf32 = convolved
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def generator_states() -> list[Tensor]:
    """[bytes] the state of the current GPU's generator; empty where no GPU has been used."""
    return [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def set_generator_states(states: list[Tensor]) -> None:
    """Bring back the states [bytes] that `generator_states` gave."""
    for state in states:
        torch.cuda.set_rng_state(state)


def high_priority() -> Any:
    """The options of a process group whose collectives run at high priority."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def group_limit(backend: str, seconds: float) -> float:
    """The limit of a process group in whose waits a rank gives up after ``seconds``.

    NCCL's watchdog ends the whole process, without a word about other ranks. It is left the last resort, for a host
    that is stuck in a call of CUDA.
    """
    return 2 * seconds + _LAST_RESORT if BACKEND in backend else seconds


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Give up whatever is in flight in process groups, all from this thread.

    NCCL's communicators are aborted in one bracket, as torch does with all groups: an abort may else wait for another
    communicator of the same device. `destroy_process_group` comes behind all of it, since it waits for works.
    """
    brackets = [backend for group in groups if (backend := _communicators(group)) is not None][:1]
    for backend in brackets:
        backend._group_start()
    try:
        for group in groups:
            group.abort()
    finally:
        for backend in brackets:
            backend._group_end()


def carries(group: dist.ProcessGroup) -> bool:
    """Whether a group's works run in streams of GPUs, where those of a lost rank stay until they are aborted."""
    return _communicators(group) is not None


def _communicators(group: dist.ProcessGroup) -> Any:
    """The backend of NCCL behind a group; None where another one carries its messages."""
    if not dist.is_nccl_available():
        return None
    try:
        backend = group._get_backend(torch.device(TYPE))
    except RuntimeError:
        return None
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def pageable(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a function that makes tensors, without pinned memory."""
    return options | {"pin_memory": False} if "pin_memory" in options else options
