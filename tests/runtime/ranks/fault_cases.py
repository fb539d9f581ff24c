"""Faults that the tests inject on ranks of a pool, and what each rank then reports."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # loaded by the first step otherwise, whose seconds are measured
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Pipeline
from schedc_runtime.device.choice import HostCopy, device_for, gpu
from schedc_runtime.device.simulated import SimulatedDevice
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks import patience
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.ranks.network import Network
from schedc_runtime.testing import simulated_device
from schedc_runtime.transport.distributed import _Posted
from support.runtime_cases import differences, next_token_loss, oracle, small_gpt, tokens

CPU = torch.device("cpu")


def build(timeout: float, schedule: str = "1f1b", ranks: int = 2, microbatches: int = 4) -> tuple[nn.Module, Pipeline]:
    model = small_gpt(blocks=4)
    program = compile_schedule(schedule, P=ranks, M=microbatches)
    return model, Pipeline(model, program, loss_fn=next_token_loss, timeout=timeout)


def on_call(block: nn.Module, number: int, act: Callable[[Tensor], Tensor | None]) -> None:
    """Let ``act`` see, and perhaps replace, the output of the ``number``-th real call of a block."""
    calls = iter(range(1_000_000))

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if isinstance(output, FakeTensor) or next(calls) != number:
            return None
        return act(output)

    block.register_forward_hook(hook)


def outcome(pipe: Pipeline, *data: Any) -> list[str]:
    """Class and text of what a step raises; empty if it does not."""
    try:
        pipe.step(*data)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def refusals(rank: int, world_size: int) -> list[list[str]]:
    """Batches that must be refused; the pipeline takes a good step after each."""
    _, pipe = build(timeout=20)
    batch, targets = tokens(8)
    last = rank == world_size - 1
    bad: list[tuple[Any, Any]] = [
        (batch[:7], targets[:7]),
        (batch[: 8 if rank else 4], targets),
        (batch, None if last else targets),
        (batch, targets[:4]),
        ((batch, object()), targets),
        ((batch, None, 3), targets),
    ]
    outcomes, expected = [], oracle(pipe, batch, targets)
    for data in bad:
        outcomes.append(outcome(pipe, *data))
        pipe.zero_grad()
        assert differences(pipe, pipe.step(batch, targets), expected) == []
    try:
        pipe.step(batch, targets) if rank else pipe.evaluate(batch, targets)
    except Exception as error:
        outcomes.append([type(error).__name__, str(error)])
    pipe.close()
    return outcomes


def different_models(rank: int, world_size: int) -> list[str]:
    """Rank 1 builds or freezes its model otherwise: fatal where a stage has two copies, and only there."""
    errors = []
    for schedule, freeze in (("dualpipe", False), ("dualpipe", True), ("1f1b", False)):
        model = small_gpt(blocks=4)
        if rank == 1 and freeze:
            model.blocks[0].requires_grad_(False)
        elif rank == 1:
            nn.init.ones_(model.blocks[0].mlp.up.weight)
        try:
            Pipeline(model, compile_schedule(schedule, P=2, M=4), loss_fn=next_token_loss, timeout=20).close()
            errors.append("built")
        except Exception as error:
            errors.append(str(error).splitlines()[0])
    return errors


def other_device(rank: int, world_size: int) -> list[str]:
    """The pipeline's network for a model on a GPU, over gloo."""
    try:
        Network(Mesh(2), None, False, 20.0, torch.device("cuda", 0))
    except RuntimeFault as error:
        return [type(error).__name__, str(error)]
    return []


def changing_sizes(rank: int, world_size: int) -> list[str]:
    """Batch size and sequence length change from step to step; only the ends are given data."""
    _, pipe = build(timeout=20, ranks=world_size)
    wrong = []
    for rows, length in ((8, 6), (4, 6), (8, 3), (8, 6)):
        batch, targets = tokens(rows, length)
        expected = oracle(pipe, batch, targets)
        pipe.zero_grad()
        first, last = rank == 0, rank == world_size - 1
        wrong += differences(pipe, pipe.step(batch if first else None, targets if last else None), expected)
    pipe.close()
    return wrong


def failing(rank: int, world_size: int, fault: str, timeout: float = 2.0) -> list[Any]:
    """Rank 1 fails as ``fault`` says at the third call of its first block; what this rank raises, and when."""
    model, pipe = build(timeout)
    if rank == 1:
        on_call(model.blocks[2], 2, FAULTS[fault])
    if fault == "shape" and rank == 0:
        on_call(model.blocks[1], 2, lambda output: output[:, :3].contiguous())
    start = time.monotonic()
    first = outcome(pipe, *tokens(8))
    seconds = time.monotonic() - start
    if rank == 0 and fault in HANGS:
        REPORTED.touch()
    return [first, seconds, outcome(pipe, *tokens(8))]


REPORTED = Path(tempfile.gettempdir(), f"schedc-reported-{os.getppid()}")
"""Rank 0 makes it as soon as it has reported a fault of `HANGS`. Rank 1 then goes on, and removes it."""
HANGS = ("sleep", "spin", "stop")
_MOST = 120
"""Seconds that a rank hangs without that report: longer than the pool waits for its case."""


def _raise(output: Tensor) -> Tensor:
    raise ZeroDivisionError("injected")


def _sleep(output: Tensor) -> None:
    end = time.monotonic() + _MOST
    while not os.access(REPORTED, os.F_OK) and time.monotonic() < end:
        time.sleep(0.1)
    REPORTED.unlink()


def _hold(output: Tensor) -> None:
    """Sleeps in C with the lock of Python."""
    ctypes.PyDLL(None).usleep(4_500_000)


def _spin(output: Tensor) -> None:
    end = time.monotonic() + _MOST
    while not os.access(REPORTED, os.F_OK) and time.monotonic() < end:
        pass
    REPORTED.unlink()


def _kill(output: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(until: str) -> Callable[[Tensor], None]:
    """Stops the process. until: commands of a shell, after which it goes on."""

    def stop(output: Tensor) -> None:
        subprocess.Popen(["sh", "-c", f"{until}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    return stop


FAULTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "raise": _raise,
    "sleep": _sleep,
    "hold": _hold,
    "spin": _spin,
    "kill": _kill,
    "stop": _stop(f"for i in $(seq {_MOST}0); do [ -e {REPORTED} ] && break; sleep 0.1; done; rm {REPORTED}"),
    "pause": _stop("sleep 1"),
    "shape": lambda output: None,
}


def learning(rank: int, world_size: int) -> list[Any]:
    """Rank 1 hangs in the fifth step of a pipeline that may wait for a minute. What is raised, and when.

    The limit of the third and the fourth step, and of an evaluation behind them, which is new.
    """
    patience.LEAST, limits = 1.0, []
    model, pipe = build(timeout=60.0)
    (transport,) = pipe._network.transports.values()
    for step in range(4):
        on_call(model.blocks[2 * rank], 0, lambda output: limits.append(transport._timeout.total_seconds()))
        pipe.step(*tokens(8))
        assert transport._timeout.total_seconds() == 60, step
    on_call(model.blocks[2 * rank], 0, lambda output: limits.append(transport._timeout.total_seconds()))
    pipe.evaluate(*tokens(8))
    longest = pipe._guard._patience
    longest._seen = weakref.WeakKeyDictionary(dict.fromkeys(longest._seen, (3, 0.1)))
    if rank == 1:
        on_call(model.blocks[2], 2, FAULTS["sleep"])
    start = time.monotonic()
    told = outcome(pipe, *tokens(8))
    seconds = time.monotonic() - start
    if rank == 0:
        REPORTED.touch()
    return [limits[2:], told, seconds]


def silent_link(rank: int, world_size: int) -> list[str]:
    """Rank 1 posts its third gradient of the second step to nobody; what this rank raises."""
    _, pipe = build(timeout=2.0)
    pipe.step(*tokens(8))
    (transport,) = pipe._network.transports.values()
    post, sends = transport.post, iter(range(100))

    def lose(batch: Any) -> Any:
        handles = post([x for x in batch if x.receive or next(sends) != 2])
        if len(handles) == len(batch):
            return handles
        left = iter(handles)
        return [next(left) if x.receive else _Posted([], x.tensors) for x in batch]

    if rank == 1:
        transport.post = lose  # type: ignore[method-assign]
    text = outcome(pipe, *tokens(8))
    time.sleep(0.0 if rank == 0 else 1.0)
    return text


def pause(rank: int, world_size: int) -> list[str]:
    """Rank 1 is stopped for less than the timeout: the step is late, and right."""
    model, pipe = build(timeout=15)
    batch, targets = tokens(8)
    expected = oracle(pipe, batch, targets)
    if rank == 1:
        on_call(model.blocks[2], 2, FAULTS["pause"])
    return differences(pipe, pipe.step(batch, targets), expected)


def absent(rank: int, world_size: int) -> list[str]:
    """Rank 1 never comes to the step."""
    _, pipe = build(timeout=1.0)
    if rank == 1:
        time.sleep(3)
        return []
    return outcome(pipe, *tokens(8))


def not_finite(rank: int, world_size: int, block: int, call: int) -> list[Any]:
    """A block gives NaN for one microbatch; then the pipeline takes a good step."""
    model, pipe = build(timeout=20, ranks=world_size)
    held = {name for name, _ in pipe.named_parameters()}
    if f"blocks.{block}.mlp.up.weight" in held:
        on_call(model.blocks[block], call, lambda output: torch.full_like(output, float("nan")))
    batch, targets = tokens(8)
    try:
        pipe.step(batch, targets)
    except Exception as error:
        raised = [type(error).__name__, getattr(error, "microbatch", -1), getattr(error, "stage", -1), str(error)]
    pipe.zero_grad()
    wrong = differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets))
    pipe.close()
    return [raised, wrong]


def bad_gradient(rank: int, world_size: int) -> list[Any]:
    """A block has a gradient of one microbatch that is NaN; then the pipeline takes a good step."""
    model, pipe = build(timeout=20, ranks=world_size)
    calls = iter(range(100))
    hook = model.blocks[2].mlp.up.weight.register_hook(lambda grad: grad * float("nan") if next(calls) == 1 else grad)
    batch, targets = tokens(8)
    try:
        pipe.step(batch, targets)
    except Exception as error:
        raised = [type(error).__name__, getattr(error, "stage", -1), getattr(error, "names", []), str(error)]
    hook.remove()
    pipe.zero_grad()
    wrong = differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets))
    pipe.close()
    return [raised, wrong]


def whole_state(rank: int, world_size: int, schedule: str) -> list[Any]:
    """Train two steps, gather the whole model on rank 0, load it back everywhere."""
    model, pipe = build(timeout=20, schedule=schedule, ranks=world_size, microbatches=2 * world_size)
    original = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    batch, targets = tokens(4 * world_size)
    for _ in range(2):
        optimizer.zero_grad()
        pipe.step(batch, targets)
        optimizer.step()
    trained = float(pipe.evaluate(batch, targets))
    state = pipe.full_state_dict()
    pipe.load_state_dict(original)
    again = float(pipe.evaluate(batch, targets))
    pipe.close()
    if rank == 0:
        assert list(state) == list(original)
        twin = small_gpt(blocks=4)
        twin.load_state_dict(state)
        serial = [next_token_loss(twin(x), y) for x, y in zip(batch.chunk(4), targets.chunk(4), strict=True)]
        torch.testing.assert_close(torch.stack(serial).mean().item(), trained, rtol=1e-12, atol=0)
    return [len(state), trained, again]


def stopped_device(rank: int, world_size: int, inside: bool = False) -> list[Any]:
    """Rank 1's device stops at the third call of its first block; what this rank raises, and when.

    inside: the host waits for the device in the middle of an op, too, as exact sizes of experts do. Rank 0, which then
    waits for rank 1, has a longer limit, so that rank 1 gives up first.
    """
    left: list[str] = []
    abort, destroy = gpu.abort_groups, dist.destroy_process_group
    with simulated_device():
        model, pipe = build(timeout=4.0 if inside and rank == 0 else 1.0)
        pipe.step(*tokens(8))

        def stop(output: Tensor) -> None:
            device = device_for(CPU)
            assert isinstance(device, SimulatedDevice)
            device.stopped = True
            if inside:
                HostCopy(output.detach()).join()

        def aborted(groups: Any) -> None:
            left.extend(["abort"] * len(groups))
            abort(groups)

        def destroyed(group: Any) -> None:
            left.append("destroy")
            destroy(group)

        if rank == 1:
            on_call(model.blocks[2], 2, stop)
        gpu.abort_groups, dist.destroy_process_group = aborted, destroyed
        try:
            start = time.monotonic()
            told = outcome(pipe, *tokens(8))
            return [told, time.monotonic() - start, left]
        finally:
            gpu.abort_groups, dist.destroy_process_group = abort, destroy
