"""The adapters of DeepEP on one rank, against a module with the documented signatures. The library itself never ran."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transit.base import ExchangeCase
from schedc_runtime.transit.carried import LibraryCarrier
from schedc_runtime.transit.deep_ep import by_expert
from schedc_runtime.transit.exchangers import EXCHANGES

EXPERTS, TOP, WIDTH = 4, 3, 16


class FakeEvent:
    """An event whose wait is counted."""

    waits = 0

    def current_stream_wait(self) -> None:
        FakeEvent.waits += 1


def received(x: Tensor, ids: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    """What one rank of one receives: each token that has a choice, last token first."""
    assert x.dtype is torch.bfloat16
    assert weights is None or weights.dtype is torch.float32
    chosen = (ids >= 0).any(1).nonzero()[:, 0].flip(0)
    counts = [int((ids == expert).sum()) for expert in range(EXPERTS)]
    return chosen, ids[chosen], None if weights is None else weights[chosen], counts


def returned(x: Tensor, chosen: Tensor, tokens: int, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    back = x.new_zeros(tokens, x.shape[1]).index_copy_(0, chosen, x)
    if weights is None:
        return back, None
    return back, weights.new_zeros(tokens, weights.shape[1]).index_copy_(0, chosen, weights)


class FakeGroup:
    """A process group of one rank."""

    def size(self) -> int:
        return 1


class FakeBuffer:
    """`deep_ep.Buffer` of version 1.2."""

    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes == 2 * WIDTH * group.size()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        hint = lambda row_bytes, ranks: row_bytes * ranks  # noqa: E731
        return SimpleNamespace(get_nvl_buffer_size_hint=hint, get_rdma_buffer_size_hint=lambda *_: 0)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert topk_idx.dtype is torch.int64
        return "of ranks", None, "of experts", topk_idx >= 0, FakeEvent()

    def dispatch(
        self, x: Tensor, handle: Any = None, num_tokens_per_rank: Any = None, num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None, num_tokens_per_expert: Any = None, topk_idx: Any = None,
        topk_weights: Any = None, expert_alignment: int = 1, num_worst_tokens: int = 0, config: Any = None,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            return x[handle[0]], None, None, None, None, FakeEvent()
        assert (num_tokens_per_rank, num_tokens_per_expert) == ("of ranks", "of experts")
        chosen, ids, weights, counts = received(x, topk_idx, topk_weights)
        return x[chosen], ids, weights, counts, (chosen, len(x)), FakeEvent()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Any = None, bias: Any = None, config: Any = None,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        return *returned(x, *handle, topk_weights), FakeEvent()


class FakeElastic:
    """`deep_ep.ElasticBuffer` of version 2."""

    def __init__(
        self, group: Any, num_bytes: int | None = None, num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0,
        hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False, deterministic: bool = False,
    ) -> None:  # fmt: skip
        assert (hidden, num_topk, deterministic) == (WIDTH, TOP, True)
        self.most = num_max_tokens_per_rank

    def dispatch(
        self, x: Tensor, topk_idx: Any = None, topk_weights: Any = None,
        cumulative_local_expert_recv_stats: Any = None, num_experts: Any = None, num_max_tokens_per_rank: Any = None,
        expert_alignment: Any = None, num_sms: int = 0, num_qps: int = 0, previous_event: Any = None,
        previous_event_before_epilogue: Any = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False, handle: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert len(x) <= self.most
        assert num_experts == EXPERTS  # the library reads it beside a handle, too
        if handle is not None:
            assert topk_idx is None
            return x[handle.chosen], handle.ids, None, handle, FakeEvent()
        chosen, ids, weights, counts = received(x, topk_idx, topk_weights)
        way = SimpleNamespace(chosen=chosen, ids=ids, tokens=len(x), num_recv_tokens_per_expert_list=counts)
        return x[chosen], ids, weights, way, FakeEvent()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Any = None, bias: Any = None, num_sms: int = 0, num_qps: int = 0,
        previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        return *returned(x, handle.chosen, handle.tokens, topk_weights), FakeEvent()


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("deep_ep")
    module.Buffer, module.ElasticBuffer, module.__spec__ = FakeBuffer, FakeElastic, SimpleNamespace()
    monkeypatch.setitem(sys.modules, "deep_ep", module)


CASE = ExchangeCase(torch.device("cpu"), torch.bfloat16, WIDTH, EXPERTS, TOP, 1, 1, True)


def step(name: str, tokens: int) -> list[Tensor]:
    """The layer's output, and the gradients of its input and parameters. name: empty for torch's transport."""
    torch.manual_seed(0)
    layer = MoELayer(Router(WIDTH, RouterConfig(EXPERTS, TOP)), Experts(EXPERTS, WIDTH, 8)).bfloat16()
    x = torch.randn(tokens, WIDTH).bfloat16().requires_grad_()
    if name:
        group, exchanger = ExpertGroup.solo(), EXCHANGES[name]
        assert not exchanger.why_not(CASE)
        group.expert.process_group = FakeGroup()  # type: ignore[attr-defined]
        layer.attach(group, carry=lambda *_: LibraryCarrier(exchanger, exchanger.make(group, CASE), group))
    output = layer(x)
    output.float().sin().sum().backward()
    return [output.detach(), *(part.grad for part in (x, *layer.parameters()) if part.grad is not None)]


@pytest.mark.parametrize("tokens", [7, 0])
@pytest.mark.parametrize("name", ["deep_ep", "deep_ep_2"])
def test_an_adapter_gives_the_layer_of_torch(name: str, tokens: int) -> None:
    FakeEvent.waits = 0
    mine, wanted = step(name, tokens), step("", tokens)
    assert len(mine) == len(wanted) == 5
    for own, torchs in zip(mine, wanted, strict=True):
        torch.testing.assert_close(own, torchs, rtol=2e-2, atol=2e-2)
    assert FakeEvent.waits == 4, "dispatch, combine, and the gradient of each"


def test_choices_of_other_ranks_are_left_out() -> None:
    ids = torch.tensor([[2, -1], [0, 2], [-1, 0]])
    order, ends = by_expert(ids, 3, 4)
    assert order.tolist() == [2, 5, 0, 3]
    assert (ends.tolist(), ends.dtype) == ([2, 2, 4], torch.int32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "rows of float32: DeepEP carries bfloat16"),
        ({"processes": False}, "several ranks, each a process"),
    ],
)
def test_what_it_cannot_serve_is_said(change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason in EXCHANGES["deep_ep"].why_not(CASE._replace(**change))
    monkeypatch.delattr(sys.modules["deep_ep"], "ElasticBuffer")
    assert EXCHANGES["deep_ep_2"].why_not(CASE) == "the installed `deep_ep` has no `ElasticBuffer`"
