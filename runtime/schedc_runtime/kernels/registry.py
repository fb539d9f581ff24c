"""A row for each kernel of our own: names of kernel, launch and twin, and the variants that are compiled.

Nothing here needs Triton: kernels, launches and twins are names of the form ``module:function``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedc_runtime.kernels.route_rows import ROUTE_ROWS
from schedc_runtime.kernels.rows import KernelRow, Variant

_HERE = "schedc_runtime.kernels"


def _elementwise(fixed: Mapping[str, Any]) -> tuple[Variant, ...]:
    return Variant("bf16", "bf16", fixed), Variant("fp32", "fp32", fixed)


def _of_norm(**fixed: int) -> tuple[Variant, ...]:
    early = Variant("bf16 rounded in front of the weight", "bf16", fixed | {"EARLY": True})
    return *_elementwise(fixed | {"EARLY": False}), early


_NONE = {"bias": None, "ends": None, "scale": None}
_EXP = "exp of the device and of the host round apart"
_TENSORS = dict.fromkeys(("gate", "up", "bias", "output", "grad", "gate_grad", "up_grad"), "*T")
_ROWS = dict.fromkeys(("scale", "scale_grad"), "*fp32") | {"ends": "*i32"}
_TILES = {"TILE_ROWS": 64, "TILE_COLUMNS": 64, "TILE_INNER": 32}
_BY_TILES = (
    Variant("bf16", "bf16", _TILES | {"left_column": 1, "right_column": 1}),
    Variant("fp32", "fp32", _TILES, loose=True, capabilities=(80,)),  # 80 has the fewest registers to spare
)
_PARTS = ("rows", "at", "blank", "out", "padding", "counts", "lengths", "columns", "row_strides", "out_strides")
_SHAPED = ("rows", "out", "columns", "row_strides", "out_strides")
_CHOICE = {"TOP": 8, "GROUPS": 8, "LIMIT": 4, "SIZE": 32, "GROUP_ROOM": 8, "ROOM": 32}
_COUNTED = {"EXPERTS": 256, "K": 8, "ROOM": 8, "CAPACITY": -1, "RANKS": 64, "NODES": 8, "BLOCK": 32}
_PRODUCTS = "schedc_runtime.triton_kernels.products"
_NORM = "schedc_runtime.triton_kernels.norm"
_SUMS = "sums of a row, or of a column, are in another order"
_ROWS_OF_NORM = dict.fromkeys(("x", "output", "grad", "x_grad", "weight", "weight_grad"), "*T") | {"rstd": "*fp32"}
_HEADS = "schedc_runtime.triton_kernels.heads"
_OF_HEADS = dict.fromkeys(("query", "turned", "pair", "table", "queries", "keys", "values"), "*T")
_HEAD = {"PLAIN": 128, "HALF": 32, "VALUE": 128, "PLAIN_ROOM": 128, "HALF_ROOM": 32, "VALUE_ROOM": 128, "TILE": 16}
_ROTATED = {"HALF": 64, "ROOM": 64, "TILE": 16}

ROWS = (
    KernelRow(
        "swiglu",
        "schedc_runtime.triton_kernels.swiglu:_forward",
        "schedc_runtime.triton_kernels.swiglu:launch_swiglu",
        f"{_HERE}.swiglu:swiglu_twin",
        _TENSORS | _ROWS,
        (
            *_elementwise({"BLOCK": 1024, "EXPERTS": 1, **_NONE}),
            Variant("bf16 with bias and scale", "bf16", {"BLOCK": 1024, "EXPERTS": 64}),
        ),
        loose=("experts",),
        bits=False,
        why=_EXP,
        bound=1e-6,
        vectors=2,
    ),
    KernelRow(
        "swiglu_backward",
        "schedc_runtime.triton_kernels.swiglu:_backward",
        "schedc_runtime.triton_kernels.swiglu:launch_swiglu_backward",
        f"{_HERE}.swiglu:swiglu_backward_twin",
        _TENSORS | _ROWS,
        (
            *_elementwise({"BLOCK": 1024, "EXPERTS": 1, "scale_grad": None, **_NONE}),
            Variant("bf16 with bias and scale", "bf16", {"BLOCK": 1024, "EXPERTS": 64}),
        ),
        loose=("experts",),
        bits=False,
        why=f"{_EXP}; a row's gradient of the scale is a sum in another order",
        bound=1e-6,
        vectors=3,
    ),
    KernelRow(
        "add_gradients",
        "schedc_runtime.triton_kernels.sums:_forward",
        "schedc_runtime.triton_kernels.sums:launch_sums",
        f"{_HERE}.sums:sums_twin",
        {"totals": "*T", "summands": "*T"},
        _elementwise({"BLOCK": 1024}),
        tuples={"totals": 64, "summands": 64, "starts": 64, "counts": 64},
        long=("counts",),
        loose=("starts", "counts"),
        vectors=2,
    ),
    KernelRow(
        "permute",
        "schedc_runtime.triton_kernels.moves:_permute",
        "schedc_runtime.triton_kernels.moves:launch_permute",
        "schedc_runtime.moe.bags:_permute",
        {
            "rows": ("*T", "*fp32", "*i16"),
            "out": ("*T", "*fp32", "*i16"),
            "at": "*i64",
            "blank": "*u8",
        },
        _elementwise({"BLOCK": 1024, "columns.1": 1}),
        tuples=dict.fromkeys(_PARTS, 3),
        loose=("padding", "counts", "lengths", *(f"{name}.{part}" for part in (1, 2) for name in _SHAPED)),
        vectors=1,
    ),
    KernelRow(
        "combine",
        "schedc_runtime.triton_kernels.moves:_combine",
        "schedc_runtime.triton_kernels.moves:launch_combine",
        "schedc_runtime.moe.bags:_combine",
        {"summands": "*T", "result": "*T", "at": "*i64", "offsets": "*i64"},
        (
            *_elementwise({"BLOCK": 1024, "LEVELS": 1}),
            Variant("bf16 by rank, node and token", "bf16", {"BLOCK": 1024, "LEVELS": 3}),
        ),
        tuples=dict.fromkeys(("at", "offsets", "bags", "entries", "rows"), 3),
        loose=("bags", "entries", "rows", "length"),
        vectors=1,
    ),
    KernelRow(
        "choose",
        "schedc_runtime.triton_kernels.routing:_choose",
        "schedc_runtime.triton_kernels.routing:launch_choose",
        "schedc_runtime.moe.router:_chosen_by",
        {"scores": "*fp32", "bias": "*fp32", "index": "*i64"},
        (Variant("8 of 256 in 4 of 8 groups", "fp32", _CHOICE, warps=1),),
        vectors=2,
    ),
    KernelRow(
        "count",
        "schedc_runtime.triton_kernels.routing:_count",
        "schedc_runtime.triton_kernels.routing:launch_count",
        "schedc_runtime.moe.counts:_count",
        {
            "index": "*i64",
            "weight": "*fp32",
            "ids": "*i16",
            "slots": "*i64",
            "unsorted": "*i16",
            "told": "*i32",
        },
        (Variant("8 of 256", "fp32", _COUNTED), Variant("with a capacity", "fp32", _COUNTED | {"CAPACITY": 40})),
        loose=("columns",),
        vectors=2,
        launches=2,
    ),
    KernelRow(
        "weighted_backward",
        "schedc_runtime.triton_kernels.gates:_weighted_backward",
        "schedc_runtime.triton_kernels.gates:launch_weighted_backward",
        "schedc_runtime.moe.stacked_linear:_backward_of_weighted",
        dict.fromkeys(("unweighted", "rows", "rows_grad", "weighted"), "*T")
        | dict.fromkeys(("gates", "gates_grad"), "*fp32"),
        _elementwise({"BLOCK": 1024}),
        bits=False,
        why="a gate's gradient is a sum in another order",
        bound=1e-6,
        vectors=2,
    ),
    KernelRow(
        "rms_rows",
        f"{_NORM}:_forward",
        f"{_NORM}:launch_rms_rows",
        f"{_HERE}.norm:rms_rows_twin",
        _ROWS_OF_NORM | {"eps": "fp32"},
        _of_norm(BLOCK=1024),
        loose=("eps",),
        bits=False,
        why=_SUMS,
        bound=1e-6,
        vectors=3,
    ),
    KernelRow(
        "rms_rows_backward",
        f"{_NORM}:_backward",
        f"{_NORM}:launch_rms_rows_backward",
        f"{_HERE}.norm:rms_rows_backward_twin",
        _ROWS_OF_NORM,
        _of_norm(BLOCK=1024),
        bits=False,
        why=_SUMS,
        bound=1e-6,
        vectors=6,
    ),
    KernelRow(
        "rms_rows_weight",
        f"{_NORM}:_weight",
        f"{_NORM}:launch_rms_rows_weight",
        f"{_HERE}.norm:rms_rows_weight_twin",
        _ROWS_OF_NORM,
        _of_norm(ROWS=64, BLOCK=32),
        bits=False,
        why=_SUMS,
        bound=1e-6,
        vectors=2,
    ),
    KernelRow(
        "latent_heads",
        f"{_HEADS}:_heads",
        f"{_HEADS}:launch_heads",
        f"{_HERE}.heads:heads_twin",
        _OF_HEADS,
        _elementwise(_HEAD),
        loose=("tokens", "heads"),
        vectors=6,
    ),
    KernelRow(
        "latent_heads_backward",
        f"{_HEADS}:_heads_backward",
        f"{_HEADS}:launch_heads_backward",
        f"{_HERE}.heads:heads_backward_twin",
        _OF_HEADS,
        _elementwise(_HEAD),
        tuples={"strides": 9},
        loose=("tokens", "heads"),
        bits=False,
        why="the gradient of what heads share is a sum in another order",
        bound=1e-6,
        vectors=6,
    ),
    KernelRow(
        "rotate",
        "schedc_runtime.triton_kernels.rotary:_rotate",
        "schedc_runtime.triton_kernels.rotary:launch_rotate",
        f"{_HERE}.rotary:rotate_twin",
        dict.fromkeys(("x", "cos", "sin", "output"), "*T"),
        (*_elementwise(_ROTATED | {"BACK": False}), Variant("bf16 backward", "bf16", _ROTATED | {"BACK": True})),
        tuples={"strides": 12},
        loose=("rows", "heads", "tokens"),
        vectors=6,
    ),
    KernelRow(
        "rows_times_weights",
        f"{_PRODUCTS}:_rows_times_weights",
        f"{_PRODUCTS}:triton_products",
        "",
        dict.fromkeys(("left", "right", "output"), "*T") | {"ends": "*i32"},
        _BY_TILES,
        loose=("experts",),
        bits=False,
        why="the loop multiplies in an order of its own",
        multiplies=True,
    ),
    KernelRow(
        "rows_times_gradients",
        f"{_PRODUCTS}:_rows_times_gradients",
        f"{_PRODUCTS}:triton_products",
        "",
        dict.fromkeys(("left", "right", "output"), "*T") | {"ends": "*i32"},
        _BY_TILES,
        bits=False,
        why="the loop multiplies in an order of its own",
        multiplies=True,
    ),
    *ROUTE_ROWS,
)
"""All kernels of our own."""
