"""Segments that replay their launches: bits of steps, microbatches in flight, and what no capture can hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Cut, Pipeline
from schedc_runtime.device.tape import CaptureRefused, LaunchTape
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Mesh
from support.sweeps import halved


class Attended(nn.Module):
    """Attention, with an in-place operation on a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(len(x), -1, 2, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        output = x + self.out(mixed)
        output.mul_(0.5)
        return output


class Drawing(nn.Module):
    """A product whose W holds the input and the gradient of the output, beside a dropout by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.1, self.training) + self.linear(x)


def steps(schedule: str, graphs: bool, drawing: bool = False, lengths: tuple[int, ...] = (3, 5, 3)) -> list[Tensor]:
    """Losses and final weights after training steps with these sequence lengths, and the report's words."""
    torch.manual_seed(0)
    blocks = [kind() for _ in range(4) for kind in ((Drawing, Attended, Drawing) if drawing else (Attended,))]
    model = nn.Sequential(*blocks).double()
    pipe = Pipeline(
        model, compile_schedule(schedule, P=1, M=4), loss_fn=functional.mse_loss, in_process=True,
        cut=Cut(blocks="", segmented=True, graphs=graphs),
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    results = []
    for number, length in enumerate(lengths):
        batch, targets = torch.randn(2, 4, length, 8, generator=torch.Generator().manual_seed(number)).double()
        optimizer.zero_grad()
        results.append(pipe.step(batch, targets))
        optimizer.step()
    assert torch.equal(pipe.evaluate(batch, targets), pipe.evaluate(batch, targets))
    said = pipe.report().splitlines()
    assert len(said) == (len(set(pipe.partition.modules)) if graphs else 0)
    assert all("graphs: " in line and "none so far" not in line for line in said)
    assert all(("; not" in line and "draws random numbers" in line) == drawing for line in said)
    return [*results, *(parameter.detach() for parameter in pipe.parameters())]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", halved(["gpipe", "zbv"]))
def test_steps_have_the_same_bits(schedule: str) -> None:
    expected, results = steps(schedule, graphs=False), steps(schedule, graphs=True)
    assert all(map(torch.equal, results, expected))


@pytest.mark.slow
def test_segments_that_draw_are_launched_as_ever() -> None:
    """Their W comes when the captures beside them serve the next microbatch."""
    expected, results = steps("zbh1", False, drawing=True), steps("zbh1", True, drawing=True)
    assert all(map(torch.equal, results, expected))


def test_a_capture_whose_backward_never_runs_is_free_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attended(), Attended()).requires_grad_(False)
    model[1].requires_grad_(True)
    pipe = Pipeline(
        model, compile_schedule("zbv", P=1, M=4), loss_fn=functional.mse_loss, in_process=True,
        cut=Cut(blocks="", segmented=True, graphs=True),
    )  # fmt: skip
    batch = torch.randn(4, 3, 8)
    for _ in range(3):
        pipe.step(batch, batch)
    captures = [
        capture
        for place in pipe.places
        for stage in pipe.held(place)
        for each in stage.captures._captures.values()  # type: ignore[attr-defined]
        for capture in each
    ]
    assert 2 <= len(captures) <= 4
    assert all(capture.free for capture in captures)


def test_graphs_need_segments() -> None:
    with pytest.raises(RuntimeFault, match="graphs=True, and stage 0 runs whole"):
        Pipeline(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), compile_schedule("1f1b", P=1, M=1),
            loss_fn=functional.mse_loss, cut=Cut(blocks="", graphs=True),
        )  # fmt: skip


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(1, experts=2)])
def test_graphs_need_a_pipeline_whose_steps_no_message_enters(mesh: Mesh) -> None:
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(RuntimeFault, match=f"graphs=True on {mesh.pipeline} pipeline and {mesh.experts} expert ranks"):
        Pipeline(
            blocks, compile_schedule("1f1b", P=mesh.pipeline, M=2), loss_fn=functional.mse_loss, in_process=True,
            mesh=mesh, cut=Cut(blocks="", segmented=True, graphs=True),
        )  # fmt: skip


def test_a_tape_replays_on_new_values_at_old_addresses() -> None:
    x = torch.randn(4, 3)
    with LaunchTape() as tape:
        y = x.t().contiguous().add_(1).flatten()[2:] * 2
    x.copy_(torch.arange(12.0).view(4, 3))
    address = y.data_ptr()
    tape.replay()
    assert y.data_ptr() == address
    assert torch.equal(y, (x.t().flatten() + 1)[2:] * 2)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense` asks"),
        (lambda x: x[x > 0], "asks the host"),
        (lambda x: x.add_(1), "writes into a tensor from outside"),
        (torch.rand_like, "draws random numbers"),
        (lambda x: functional.dropout(x, 0.5), "draws random numbers"),
    ],
)
def test_what_no_capture_can_hold(call, reason: str) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(4)
    with pytest.raises(CaptureRefused, match=reason), LaunchTape():
        call(x)
