"""Products, exchanges and launches of parts on a rank, and times of matrix products by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from schedc.ir.arrays import Floats
from schedc.model.parts import LayerExchange, PartName
from schedc.model.sizes import AttentionSizes, ModelSizes
from schedc.planner.fit.estimate import at
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.times.constants import CONSTANTS, ConstantVectors
from schedc.planner.times.network import exchanges, expert_exchange, tensor_exchange
from schedc.planner.times.parts import dense_layer, moe_layer, moe_segments
from schedc.planner.times.products import LayerProduct, directions, part_products
from schedc.planner.times.table import RunTable
from support.training_runs import run_of

MODEL = ModelSizes("m", 2, 1024, 1024, AttentionSizes(8, 8, 128, 128), ffn=4096, gated=False, seq=1024)


def seconds_per_flop(cluster: str, precision: str, summed: float, grouped: bool, k0: float) -> float:
    """Forward, where memory takes no time and the device is full."""
    table = RunTable([run_of(MODEL, open_cluster(cluster), precision=precision)])
    rows, columns, k = (np.array([[size]]) for size in (2.0**17, 2.0**15, summed))
    forward, _, _ = directions(table, LayerProduct(rows, columns, k, np.ones((1, 1)), grouped=grouped))
    constants = {constant.name: constant.median for constant in CONSTANTS} | {"gemm_k0": k0, "hbm": 1e9}
    return float(forward.seconds(at(constants))[0, 0] / (2.0**33 * summed))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("cluster", "precision", "columns"),
    [
        ("a100-80", "bf16", 100.0),
        ("h100", "bf16", 100.0 * (989 / 3.35) / 153),
        ("h100", "fp8", 100.0 * (1979 / 3.35) / 153),
    ],
)
def test_short_sums_take_as_many_columns_longer(cluster: str, precision: str, columns: float, grouped: bool) -> None:
    """A start takes the time of memory: on an A100 that of ``gemm_k0`` columns, elsewhere by FLOP per byte."""
    short, whole = (seconds_per_flop(cluster, precision, 512.0, grouped, k0) for k0 in (100.0, 1e-9))
    assert short / whole == pytest.approx(1 + columns / 512, rel=1e-3)
    long, endless = (seconds_per_flop(cluster, precision, 8192.0, grouped, k0) for k0 in (100.0, 1e-9))
    assert long / endless == pytest.approx(1 + columns / 8192, rel=1e-3)


@pytest.mark.parametrize("way", range(3))
def test_more_rows_of_experts_take_longer(way: int) -> None:
    """From 1 to 8,192 rows of an expert, in each direction."""
    table = RunTable([run_of(MODEL, open_cluster("h100"))])
    rows = np.geomspace(1, 8192, 40)[None, :]
    size = np.ones_like(rows)
    work = directions(table, LayerProduct(rows, 4096 * size, 1024 * size, 8 * size, grouped=True))[way]
    assert (np.diff(work.seconds(at({}))) > 0).all()


@pytest.mark.parametrize("grouped", [False, True])
def test_no_product_is_faster_than_the_peak(grouped: bool) -> None:
    table = RunTable([run_of(MODEL, open_cluster("h100"), precision="fp8")])
    forward, _, _ = directions(table, LayerProduct(*np.full((3, 1, 1), 2.0**15), np.ones((1, 1)), grouped=grouped))
    best = forward.seconds(at({"fp8": 9.0, "grouped": 9.0, "gemm_k0": 0.0, "grouped_r0": 0.0, "hbm": 1e9}))
    assert best.item() == pytest.approx(2.0**46 / 1979e12)


def on_ranks(name: PartName, *models: str, **given: int) -> list[tuple[list[float], list[float], list[float]]]:
    """Columns, summed columns and matrices of the products of a part, of each model in one table."""
    table = RunTable([run_of(open_model(model).at(4096), open_cluster("h800"), **given) for model in models])
    return [(x.n[:, 0].tolist(), x.k[:, 0].tolist(), x.count[:, 0].tolist()) for x in part_products(table, name)]


def test_a_tensor_rank_has_one_head_of_keys_at_least() -> None:
    """64 heads of queries and 4 of keys, 128 columns each: 8 ranks have 8 and 1. Narrow matrices are whole."""
    assert on_ranks(PartName.ATTENTION, "qwen3-235b-a22b", "deepseek-v3", tp=8) == [
        ([8 * 128 + 2 * 128, 1536], [4096, 7168], [1, 1]),
        ([4096, 16 * 192], [8 * 128, 1536], [1, 1]),
        ([0, 576], [0, 7168], [0, 1]),
        ([0, 16 * 256], [0, 512], [0, 1]),
        ([0, 7168], [0, 16 * 128], [0, 1]),
    ]
    assert on_ranks(PartName.ATTENTION, "qwen3-235b-a22b", tp=2)[0] == ([(64 + 8) * 128 / 2], [4096], [1])


def test_expert_ranks_share_experts_and_tensor_ranks_split_the_rest() -> None:
    assert on_ranks(PartName.EXPERTS, "deepseek-v3", "llama-3.1-8b", ep=32, tp=4) == [
        ([4096, 0], [7168, 0], [8, 0]),
        ([7168, 0], [2048, 0], [8, 0]),
    ]
    assert on_ranks(PartName.SHARED, "deepseek-v3", tp=4)[0] == ([1024], [7168], [1])
    assert on_ranks(PartName.ROUTER, "deepseek-v3", tp=4) == [([256], [7168], [1])]
    assert on_ranks(PartName.HEAD, "deepseek-v3", tp=4) == [([129280 / 4], [7168], [1])]


def test_parts_say_how_often_ranks_exchange_rows() -> None:
    run = run_of(open_model("deepseek-v3").at(4096), open_cluster("h800"), tp=2, ep=8, dp=4)
    table, constants = RunTable([run]), at({})
    tensor, expert = tensor_exchange(table, constants), expert_exchange(table, constants)
    assert tensor > 0
    for behind in (PartName.DENSE, PartName.EXPERTS):
        assert exchanges(table, constants, LayerExchange.TENSOR, PartName.ATTENTION, behind) == 2 * tensor
    assert exchanges(table, constants, LayerExchange.TENSOR, PartName.EMBEDDING) == tensor
    for kind in (LayerExchange.DISPATCH, LayerExchange.COMBINE):
        assert exchanges(table, constants, kind, PartName.EXPERTS) == expert
        assert exchanges(table, constants, kind, PartName.ATTENTION, PartName.DENSE) == 0


def layers_of(ep: int = 8, part: Callable[..., Floats] = moe_layer, **traits: bool) -> Floats:
    """[3] seconds of a layer of Qwen3-30B-A3B, of which each expert launches for a second and all others for 1 ms.

    The links take no time.
    """
    links = dict.fromkeys(("ep_alpha", "ep_peer"), 0.0) | {"ep": 1e6}
    constants = at({"expert_launch": 1.0, "launch": 1e-3, "moe_launch": 1.0, "pieces": 1.5, "graphed": 0.5} | links)
    run = run_of(open_model("qwen3-30b-a3b").at(4096), open_cluster("h100"), ep=ep, dp=ep, **traits)
    return np.asarray(part(RunTable([run]), constants)[:, 0, 0])


def test_each_expert_of_a_rank_is_launched() -> None:
    """128 experts on 2, 8 and 32 ranks. Weight gradients take half. Graphs of attention hold no kernels of experts."""
    for ep in (2, 8, 32):
        own = np.array([1.0, 1.0, 0.5]) * 128 / ep
        assert layers_of(ep) == pytest.approx(own, rel=1e-3)
        assert layers_of(ep, attention_graphs=True) == pytest.approx(own, rel=1e-3)
        assert layers_of(ep, pairs=True) == pytest.approx(1.5 * own, rel=3e-3)
    assert (layers_of(graphs=True) < 0.1).all()
    assert (layers_of(part=dense_layer) < 0.1).all()


def test_launches_of_experts_belong_to_their_segment() -> None:
    def of_experts(runs: RunTable, constants: ConstantVectors) -> Floats:
        segments = moe_segments(runs, constants)
        assert all(part.sum() < 0.1 for role, part in segments.items() if role != "experts")
        return segments["experts"]

    assert layers_of(part=of_experts, pairs=True) == pytest.approx([24.0, 24.0, 12.0], rel=1e-3)
