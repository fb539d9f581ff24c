"""The adapters of DeepEP on one rank, against a module with the documented signatures. The library itself never ran.

`SIGNATURES` has the names of its parameters, read in its public sources. Each call of an adapter must fit them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transit import deep_ep
from schedc_runtime.transit.base import ExchangeCase
from schedc_runtime.transit.carried import LibraryCarrier
from schedc_runtime.transit.deep_ep import _buffer, _elastic, by_expert
from schedc_runtime.transit.exchangers import EXCHANGES

EXPERTS, TOP, WIDTH = 4, 3, 16

_DISPATCH_1 = (
    "x handle= num_tokens_per_rank= num_tokens_per_rdma_rank= is_token_in_rank= num_tokens_per_expert= topk_idx="
    " topk_weights= expert_alignment= num_worst_tokens= config= previous_event= async_finish= allocate_on_comm_stream="
)
_INIT_2 = "group num_bytes= {} num_max_tokens_per_rank= hidden= num_topk= use_fp8_dispatch= {} deterministic="
_DISPATCH_2 = (
    "x topk_idx= topk_weights= cumulative_local_expert_recv_stats= num_experts= num_max_tokens_per_rank="
    " expert_alignment= num_sms= num_qps= previous_event= {} async_with_compute_stream= allocate_on_comm_stream="
    " handle= do_handle_copy= do_cpu_sync= do_expand= do_zero_padding= use_tma_aligned_col_major_sf= {}"
)
_COMBINE_2 = (
    "x handle topk_weights= bias= num_sms= num_qps= previous_event= {} async_with_compute_stream="
    " allocate_on_comm_stream= {}"
)
_EARLY = "previous_event_before_epilogue="

SIGNATURES = {
    "Buffer": {
        "__init__": "group num_nvl_bytes= num_rdma_bytes= low_latency_mode= num_qps_per_rank=",
        "get_dispatch_config": "num_ranks",
        "get_combine_config": "num_ranks",
        "get_dispatch_layout": "topk_idx num_experts previous_event= async_finish= allocate_on_comm_stream=",
        "dispatch": _DISPATCH_1,
        "combine": "x handle topk_weights= bias= config= previous_event= async_finish= allocate_on_comm_stream=",
    },
    "ElasticBuffer": {
        "__init__": _INIT_2.format("num_cpu_bytes=", ""),
        "dispatch": _DISPATCH_2.format(_EARLY, ""),
        "combine": _COMBINE_2.format(_EARLY, ""),
    },
    "EPBuffer": {
        "__init__": _INIT_2.format("", "lb_allocation_plan_or_num_bytes="),
        "dispatch": _DISPATCH_2.format("", "defer_epilogue="),
        "combine": _COMBINE_2.format("", "defer_epilogue="),
    },
}
"""Parameters of DeepEP's methods beside `self`, in their order, by class (`Buffer` of 1.2.1 and 2.0, `ElasticBuffer` of
2.0, `EPBuffer` behind it). Those with `=` have a default. What stands behind an `__init__`'s last one is left out."""

CLASSES = {"deep_ep": ["Buffer"], "deep_ep_2": ["ElasticBuffer", "EPBuffer"]}


def signature(line: str) -> inspect.Signature:
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    words = [(word.rstrip("="), None if word.endswith("=") else none) for word in line.split()]
    return inspect.Signature([inspect.Parameter(name, kind, default=default) for name, default in words])


def bound(seen: set[str], name: str, call: Callable[..., Any], line: str, own: int) -> Callable[..., Any]:
    """A method whose calls must fit a line of the table; their names of parameters are added to ``seen``."""

    def checked(*args: Any, **named: Any) -> Any:
        given = signature(line).bind(*args[own:], **named)
        seen.add(f"{name}({' '.join(given.arguments)})")
        return call(*args, **named)

    return checked


class FakeEvent:
    """An event whose wait is counted. behind: what the library does in the first wait."""

    waits = 0

    def __init__(self, behind: Callable[[], Any] = lambda: None) -> None:
        self._behind = behind

    def current_stream_wait(self) -> None:
        FakeEvent.waits += 1
        self._behind()
        self._behind = lambda: None


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
    """`deep_ep.ElasticBuffer` of version 2, in its deterministic order: a wait turns what a dispatch has received."""

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
            rows, ids = x[handle.chosen.flip(0)], handle.ids.flip(0)
            return rows, ids, None, handle, FakeEvent(lambda: [each.copy_(each.flip(0)) for each in (rows, ids)])
        chosen, ids, weights, counts = received(x, topk_idx, topk_weights)
        assert weights is not None
        way = SimpleNamespace(chosen=chosen, ids=ids, tokens=len(x), num_recv_tokens_per_expert_list=counts)
        rows, sorted_in_wait = x[chosen], (chosen, ids, weights)
        turned = [rows, *sorted_in_wait]
        return rows, ids, weights, way, FakeEvent(lambda: [each.copy_(each.flip(0)) for each in turned])

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Any = None, bias: Any = None, num_sms: int = 0, num_qps: int = 0,
        previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        return *returned(x, handle.chosen, handle.tokens, topk_weights), FakeEvent()


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Calls of the module, each with the parameters that it is given."""
    seen: set[str] = set()
    module: Any = ModuleType("deep_ep")
    module.__spec__ = SimpleNamespace()
    for name, lines in SIGNATURES.items():
        fake = FakeBuffer if name == "Buffer" else FakeElastic
        methods: dict[str, Any] = {}
        for method, line in lines.items():
            own = not isinstance(inspect.getattr_static(fake, method), staticmethod)
            call = bound(seen, method, getattr(fake, method), line, int(own))
            methods[method] = call if own else staticmethod(call)
        setattr(module, name, type(name, (fake,), methods))
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    _buffer.cache_clear()
    _elastic.cache_clear()
    yield seen
    _buffer.cache_clear()
    _elastic.cache_clear()


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


CALLS = {
    "deep_ep": {
        "__init__(group num_nvl_bytes num_rdma_bytes)",
        "get_dispatch_config(num_ranks)",
        "get_combine_config(num_ranks)",
        "get_dispatch_layout(topk_idx num_experts)",
        "dispatch(x num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert topk_idx"
        " topk_weights async_finish)",
        "dispatch(x handle async_finish)",
        "combine(x handle topk_weights async_finish)",
    },
    "deep_ep_2": {
        "__init__(group num_max_tokens_per_rank hidden num_topk deterministic)",
        "dispatch(x topk_idx topk_weights num_experts async_with_compute_stream)",
        "dispatch(x num_experts async_with_compute_stream handle)",
        "combine(x handle topk_weights async_with_compute_stream)",
    },
}


@pytest.mark.parametrize("tokens", [7, 0])
@pytest.mark.parametrize(("name", "held"), [(name, held) for name, all_held in CLASSES.items() for held in all_held])
def test_an_adapter_gives_the_layer_of_torch(
    name: str, held: str, tokens: int, calls: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With calls that fit the signatures of the one class that a release has."""
    for other in SIGNATURES.keys() - {held}:
        monkeypatch.delattr(sys.modules["deep_ep"], other)
    FakeEvent.waits = 0
    mine, wanted = step(name, tokens), step("", tokens)
    assert len(mine) == len(wanted) == 5
    for own, torchs in zip(mine, wanted, strict=True):
        torch.testing.assert_close(own, torchs, rtol=2e-2, atol=2e-2)
    assert FakeEvent.waits == 4, "dispatch, combine, and the gradient of each"
    assert calls == CALLS[name]


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


def test_a_package_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = sys.modules["deep_ep"]

    def unknown(num_ranks: int) -> None:
        raise AssertionError(f"Unsupported number of EP ranks: {num_ranks}")

    monkeypatch.setattr(library.Buffer, "get_combine_config", staticmethod(unknown))
    assert "no configuration for 3 ranks: Unsupported number" in EXCHANGES["deep_ep"].why_not(CASE._replace(ranks=3))
    assert EXCHANGES["deep_ep_2"].why_not(CASE._replace(ranks=3)) == ""
    monkeypatch.setattr(library, "Buffer", None)  # as a build without version 1 has it
    assert EXCHANGES["deep_ep"].why_not(CASE) == "the installed `deep_ep` has no `Buffer`"
    monkeypatch.delattr(library, "ElasticBuffer")
    assert EXCHANGES["deep_ep_2"].why_not(CASE) == ""
    monkeypatch.delattr(library, "EPBuffer")
    assert EXCHANGES["deep_ep_2"].why_not(CASE) == "the installed `deep_ep` has no `EPBuffer` and no `ElasticBuffer`"

    def broken(name: str) -> None:
        raise AssertionError("two versions of a library")

    monkeypatch.setattr(deep_ep, "import_module", broken)
    assert EXCHANGES["deep_ep"].why_not(CASE) == (
        "the package `deep_ep` does not import: AssertionError: two versions of a library"
    )
