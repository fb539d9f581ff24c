"""Transports: order, rendezvous, shapes; the same exchanges over gloo and in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedc_runtime.testing import pool
from schedc_runtime.transport.base import MessageForm, MessageMismatch, Transfer
from schedc_runtime.transport.in_process import InProcessNetwork


def test_a_send_is_complete_only_when_it_is_received() -> None:
    network = InProcessNetwork(2)
    a, b = network.transport(0), network.transport(1)
    (sent,) = a.post([Transfer(1, False, (torch.ones(3),))])
    assert not a.ready(sent)
    with pytest.raises(RuntimeError, match="not ready"):
        a.wait(sent)
    buffer = torch.zeros(3)
    (received,) = b.post([Transfer(0, True, (buffer,))])
    assert a.ready(sent)
    assert b.ready(received)
    assert buffer.tolist() == [1, 1, 1]
    assert network.unmatched() == 0


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.booleans()), max_size=40))
def test_channels_are_fifo_whatever_the_order_of_posting(posts: list[tuple[int, bool]]) -> None:
    network = InProcessNetwork(2)
    ends = [network.transport(0), network.transport(1)]
    sent, received = [0, 0], [[], []]  # type: ignore[var-annotated]
    for rank, receive in posts:
        buffer = torch.tensor([-1.0 if receive else float(sent[rank])])
        (handle,) = ends[rank].post([Transfer(1 - rank, receive, (buffer,))])
        if receive:
            received[rank].append((handle, buffer))
        else:
            sent[rank] += 1
    for rank in (0, 1):
        arrived = [buffer.item() for handle, buffer in received[rank] if ends[rank].ready(handle)]
        assert arrived == [float(n) for n in range(min(len(received[rank]), sent[1 - rank]))]


@pytest.mark.parametrize("receive_first", [False, True])
@pytest.mark.parametrize(
    ("buffer", "shown"),
    [(torch.zeros(2), r"float32\[2\]"), (torch.zeros(3, dtype=torch.float64), r"float64\[3\]")],
)
def test_a_mismatch_names_both_sides(receive_first: bool, buffer: torch.Tensor, shown: str) -> None:
    network = InProcessNetwork(2)
    ends = [
        (network.transport(0), Transfer(1, False, (torch.ones(3),))),
        (network.transport(1), Transfer(0, True, (buffer,))),
    ]
    first, second = reversed(ends) if receive_first else ends
    first[0].post([first[1]])
    with pytest.raises(MessageMismatch, match=rf"rank 0 sends float32\[3\] to rank 1.*receive of {shown}"):
        second[0].post([second[1]])


def test_a_tensor_is_checked_against_its_boundary() -> None:
    form = MessageForm([((2, 3), torch.float32)])
    form.check([torch.zeros(2, 3)])
    with pytest.raises(MessageMismatch, match=r"tensor 0 to send is float32\[3, 2\], .* says float32\[2, 3\]"):
        form.check([torch.zeros(3, 2)])
    with pytest.raises(MessageMismatch, match=r"tensor 0 to send is float64\[2, 3\], .* says float32\[2, 3\]"):
        form.check([torch.zeros(2, 3, dtype=torch.float64)])
    with pytest.raises(MessageMismatch, match="2 tensors to send where the boundary has 1"):
        form.check([torch.zeros(2, 3)] * 2)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (5, 1, 3), (0, 4), (4, 0, 2), (1, 1)])
def test_buffers_are_new_and_those_of_torch(shape: tuple[int, ...]) -> None:
    form = MessageForm([(shape, torch.float32), (shape, torch.int64)])
    first, second = form.buffers(torch.device("cpu")), form.buffers(torch.device("cpu"))
    for buffer, (size, dtype) in zip(first, form.specs, strict=True):
        like = torch.empty(size, dtype=dtype)
        assert (buffer.shape, buffer.dtype, buffer.stride()) == (like.shape, like.dtype, like.stride())
    assert all(a.untyped_storage()._cdata != b.untyped_storage()._cdata for a, b in zip(first, second, strict=True))
    assert form.buffers(torch.device("meta"))[0].is_meta


@pytest.mark.processes
def test_gloo() -> None:
    assert pool(2).run("runtime.transport.transport_cases:exchange") == [True, True]


@pytest.mark.processes
@pytest.mark.parametrize("seconds", [0.5])
def test_a_wait_over_gloo_ends_in_a_timeout(seconds: float) -> None:
    answers: list[Any] = pool(2).run("runtime.transport.transport_cases:timeout", seconds=seconds)
    assert answers[0][0] == "TransportError"
    assert "Timed out waiting 500ms" in answers[0][1]
    assert "gloo/transport" not in answers[0][1]
