"""The norm and the heads of latent attention as operations, beside the same written in torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.nn import functional

from schedc_runtime.kernels import heads
from schedc_runtime.kernels.heads import heads_of_latents
from schedc_runtime.kernels.norm import OneLaunchRMSNorm, normalised
from schedc_runtime.triton_kernels import latents as latents_memory

HEADS, PLAIN, ROTARY, VALUE = 3, 4, 6, 5


def gradients(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """[leaves] gradients, of results whose gradients are random numbers."""
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
    return torch.autograd.grad(results, leaves, given)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("eps", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_has_the_bits_of_torch(dtype: torch.dtype, eps: float | None) -> None:
    torch.manual_seed(0)
    for shape, weighted in (((2, 7, 64), torch.float32), ((5, 33), dtype), ((3, 40), None)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        weight = None if weighted is None else torch.randn(shape[-1:], dtype=weighted, requires_grad=True)
        leaves = [leaf for leaf in (x, weight) if leaf is not None]
        ours, theirs = normalised(x, weight, eps), functional.rms_norm(x, shape[-1:], weight, eps)
        assert torch.equal(ours, theirs)
        assert ours.dtype is theirs.dtype
        assert all(map(torch.equal, gradients([ours], leaves), gradients([theirs], leaves)))


def test_the_norm_holds_no_product() -> None:
    saved: list[Tensor] = []
    norm, x = OneLaunchRMSNorm(16), torch.randn(8, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        norm(x)
    assert sorted(tensor.numel() for tensor in saved) == [8, 16, 8 * 16]


def turned(x: Tensor) -> Tensor:
    """[..., tokens, r] x, whose planes are turned."""
    exponents = torch.arange(0, x.shape[-1], 2, dtype=x.dtype) / x.shape[-1]
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 10000.0**-exponents
    first, second = x.chunk(2, -1)
    sine, cosine = angle.sin(), angle.cos()
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def written_out(query: Tensor, shared: Tensor, pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by torch's operations."""
    queries, both = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (query, pair))
    plain, with_positions = queries.split((PLAIN, ROTARY), -1)
    keys, values = both.split((PLAIN, VALUE), -1)
    shared = turned(shared).unsqueeze(1).expand(-1, HEADS, -1, -1)
    return torch.cat((plain, turned(with_positions)), -1), torch.cat((keys, shared), -1), values


def latents(dtype: torch.dtype, tokens: int = 5) -> list[Tensor]:
    """query, turned and pair. The second is a part of a wider tensor, as that of a product is."""
    torch.manual_seed(0)
    widths = (HEADS * (PLAIN + ROTARY), ROTARY, HEADS * (PLAIN + VALUE))
    first, second, third = (torch.randn(2, tokens, width + 7, dtype=dtype) for width in widths)
    return [x.requires_grad_() for x in (first[..., 7:].contiguous(), second[..., 7:], third[..., 7:].contiguous())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_heads_are_those_that_torch_computes(dtype: torch.dtype) -> None:
    leaves = latents(dtype)
    ours, theirs = heads_of_latents(*leaves, HEADS, PLAIN), written_out(*leaves)
    assert all(map(torch.equal, ours, theirs))
    assert [x.transpose(1, 2).is_contiguous() for x in ours] == [True] * 3
    assert all(map(torch.equal, gradients(ours, leaves), gradients(theirs, leaves)))


def test_the_gradient_of_heads_is_that_of_differences() -> None:
    assert gradcheck(lambda *given: heads_of_latents(*given, HEADS, PLAIN), latents(torch.float64, tokens=2))


def test_positions_are_relative() -> None:
    """The product of a query and a key depends on how far apart they are, and on position 0 nothing is turned."""
    query, shared, pair = (x.detach()[:, :1].expand(-1, 5, -1) for x in latents(torch.float64))
    queries, keys, _ = heads_of_latents(query, shared, pair, HEADS, PLAIN)
    products = queries @ keys.mT
    torch.testing.assert_close(products[..., 1:, 1:], products[..., :-1, :-1])
    assert not torch.allclose(products[..., 0, 0], products[..., 0, 1])
    assert torch.equal(queries[:, :, 0].flatten(1), query[:, 0])


def test_all_blocks_share_a_table_for_all_lengths() -> None:
    """Its numbers are real, also where it is first asked for among fakes."""
    before = latents_memory._table.cache_info().misses
    like = torch.empty(1, 700, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        latents_memory.rotary_table(like, 6)
    long = latents_memory.rotary_table(like, 6)
    for tokens in (699, 650, 514):
        assert torch.equal(latents_memory.rotary_table(torch.empty(1, tokens, 2), 6), long[:, :tokens])
    assert latents_memory._table.cache_info().misses == before + 1


def test_operations_say_their_shapes_without_values() -> None:
    calls = [
        (heads.latent_heads, (*(x.detach() for x in latents(torch.float32)), HEADS, PLAIN)),
        (heads.latent_heads_backward, (*(torch.randn(2, HEADS, 5, n) for n in (10, 10, VALUE)), ROTARY)),
    ]
    for operation, args in calls:
        given = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args]
        for real, meta in zip(operation(*args), operation(*given), strict=True):
            assert (real.shape, real.stride(), real.dtype) == (meta.shape, meta.stride(), meta.dtype)


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not")
def test_compiled_code_has_one_operation_for_each() -> None:
    norm, leaves, graphs = OneLaunchRMSNorm(HEADS * (PLAIN + ROTARY)), latents(torch.float32), []

    def whole(query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return heads_of_latents(norm(query), *others, HEADS, PLAIN)

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda graph, given: make_boxed_func(keep(graph, given).forward))
    results = torch.compile(whole, backend=backend, fullgraph=True)(*leaves)
    parameters = [*leaves, norm.weight]
    assert all(map(torch.equal, gradients(results, parameters), gradients(whole(*leaves), parameters)))
    names = [node.target.__name__ for graph in graphs for node in graph.graph.nodes if "schedc" in str(node.target)]
    assert sorted(names) == [
        "latent_heads.default", "latent_heads_backward.default", "rms_rows.default", "rms_rows_backward.default",
        "rms_rows_weight.default",
    ]  # fmt: skip
