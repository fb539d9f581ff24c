"""Rows of the registry for kernels that plan where rows of experts go, and weigh choices: short lists of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from schedc_runtime.kernels.rows import KernelRow, Variant

_MOE = "schedc_runtime.moe"
_FILES = "schedc_runtime.triton_kernels"
_WEIGHED = {"EXPERTS": 256, "TOP": 8, "ROOM": 256, "TOP_ROOM": 8, "NORMALISE": True}
_SHARED = dict.fromkeys(("scores", "weight", "shares", "gradient", "of_shares", "result"), "*fp32") | {"index": "*i64"}
_NOTED = {"EXPERTS": 256, "NODES": 8, "RANKS": 64, "RANK": 5, "RANK_ROOM": 64, "ROOM": 4}
_NUMBERS = ("token", "entry", "back", "at", "slots", "direct", "row", "place", "landed")
_LISTS = (
    dict.fromkeys(_NUMBERS, "*i64")
    | dict.fromkeys(("blank", "absent"), "*u8")
    | {"ids": "*i16", "table": "*i32", "ends": "*i32"}
)
_PACKED = {"K": 8, "EXPERTS": 256, "FIRST": 4, "SECOND": 32, "ROOM": 256, "UNREAD": 64, "BLOCK": 1024}
_LANDED = {"RANKS": 64, "LOCAL": 4, "RANK_ROOM": 64, "ROOM": 4, "BLOCK": 1024}
_LONG = {"K": 8, "UNREAD": 64, "BLOCK": 1024}
_RAIL = _LONG | {"PARTS": 8, "WIDTH": 8, "FIRST": 0, "EACH": 32, "ALL": False, "BLOCKS": 1}
_RELAY = _LONG | {"PARTS": 8, "WIDTH": 8, "FIRST": 64, "EACH": 4, "ALL": False, "BLOCKS": 8}
_NO_GATES = dict.fromkeys(("slots", "direct", "back"))
_HOP = _LONG | {"EXPERTS": 256, "NODES": 8, "PER_NODE": 8, "RANK": 5, "RANK_ROOM": 64, "ROOM": 4}
_SIZED: dict[str, Any] = {"EXPERTS": 256, "FIRST": 4, "SECOND": 32, "BEFORE": 196, "ROWS": 64, "ROOM": 4}
_SIZED["PARTS"] = (
    (64, 0, 1, 1, 1, 257, 0, 1), (64, 0, 1, 1, 1, 256, 0, 1), (64, 0, 0, 1, 64, 0, 4, 4), (4, 0, 0, 1, 64, 20, 1, 1),
    (64, 5, 0, 1, 1, 0, 4, 4), (64, 0, 1, 1, 1, 20, 0, 4),
)  # fmt: skip
_FACTORS = ("balance", "balance_rest", "scale", "scale_rest")
_SUMS = "sums of a row are in another order"


def _row(
    name: str, file: str, twin: str, pointers: Mapping[str, str | tuple[str, ...]], *variants: Variant, **facts: Any
) -> KernelRow:
    launch = f"{_FILES}.{file}:launch_{name}"
    return KernelRow(name, f"{_FILES}.{file}:_{name}", launch, f"{_MOE}.{twin}", pointers, variants, **facts)


def _plain(fixed: Mapping[str, Any]) -> tuple[Variant, ...]:
    return (Variant("numbers", "fp32", fixed),)


def _fan(name: str, twin: str, variant: str, fixed: Mapping[str, Any]) -> KernelRow:
    pointers = _LISTS | {"begins": "*i64"}
    row = _row(name, "hops", f"trees:{twin}", pointers, Variant(variant, "fp32", fixed), loose=("tokens", "length"))
    return replace(row, kernel=f"{_FILES}.hops:_plan_fan")


ROUTE_ROWS = (
    _row(
        "weights",
        "weights",
        "router:_weigh",
        _SHARED | {"scale": "fp32"},
        *_plain(_WEIGHED),
        loose=("scale",),
        bits=False,
        why=_SUMS,
        bound=1e-6,
    ),
    _row(
        "weights_backward",
        "weights",
        "router:_weigh_backward",
        _SHARED | {"scale": "fp32"},
        *_plain(_WEIGHED),
        loose=("scale",),
        bits=False,
        why=_SUMS,
        bound=1e-6,
    ),
    _row(
        "balance",
        "weights",
        "balance:_balanced",
        {"everyone": "*fp64", "total": "*fp64", "gradient": "*T", "loss": "*fp64"} | dict.fromkeys(_FACTORS, "fp32"),
        *_plain({"EXPERTS": 256, "TOP": 8, "ROOM": 256}),
        loose=(*_FACTORS, "replicas"),
        bits=False,
        why=_SUMS,
        bound=1e-7,
    ),
    _row(
        "add_load",
        "loads",
        "balance:_add",
        {"chosen": "*i64", "dropped": "*i64", "table": "*i32"},
        *_plain({"EXPERTS": 256, "DROPS": True, "BLOCK": 128}),
        loose=("ranks", "columns"),
    ),
    _row(
        "tally",
        "loads",
        "balance:_tallied",
        {"index": "*i64", "sums": "*T", "result": "*fp64"},
        *_plain({"EXPERTS": 256, "BLOCK": 1024}),
        loose=("count",),
    ),
    _row(
        "note",
        "loads",
        "planner:_note",
        {"table": "*i32", "flags": "*i64", "rows": "*i64", "now": "*i64", "received": "*i64"},
        *_plain(_NOTED | {"PAIR": 40, "RAIL": 50, "NODE": 60, "HOPS": 1}),
        loose=("columns",),
    ),
    _row(
        "drop",
        "loads",
        "capacity:_dropped",
        {"index": "*i64", "weight": "*T", "marked": "*i64", "kept": "*T", "stay": "*u8"},
        *_plain({"WEIGHTS": True, "BLOCK": 64}),
        loose=("count", "slots"),
    ),
    _row(
        "plan_packing",
        "plans",
        "trees:_plan_packing",
        _LISTS | {"follow": ("*i64", "*i64"), "begins": ("*i64",) * 3},
        Variant("with a capacity", "fp32", _PACKED | {"EACH": 1, "CAPACITY": 40}),
        Variant("exact", "fp32", _PACKED | {"EACH": 1, "CAPACITY": -1, "blank": None, "absent": None}),
        tuples={"follow": 2, "begins": 3, "bags": 2},
        loose=("count", "bags"),
    ),
    _row(
        "plan_landing",
        "plans",
        "trees:_plan_landing",
        _LISTS,
        Variant("exact", "fp32", _LANDED | {"CAPACITY": -1, "PAIR": -1, "blank": None, "absent": None}),
        Variant("bounded", "fp32", _LANDED | {"CAPACITY": -1, "PAIR": 40}),
        loose=("rows", "columns"),
    ),
    _fan("plan_rail_packing", "_plan_rail_packing", "over the rail", _RAIL | {"PAD": -1, "blank": None}),
    _fan("plan_relay", "_plan_relay", "in the node, padded", _RELAY | _NO_GATES | {"PAD": 40}),
    _row(
        "plan_hop_landing",
        "hops",
        "trees:_plan_hop_landing",
        _LISTS | {"begins": "*i64"},
        Variant("exact", "fp32", _HOP | {"CAPACITY": -1, "PASS": -1, "blank": None}),
        Variant("with a capacity", "fp32", _HOP | {"CAPACITY": 40, "PASS": 100}),
        Variant("bounded", "fp32", _HOP | {"CAPACITY": -1, "PASS": 100}),
        loose=("count", "rows", "columns"),
    ),
    _row(
        "plan_sizes",
        "sizes",
        "sizes:_of_counts",
        _LISTS | {"told": "*i32", "starts": ("*u8",) * 2, "counted": ("*i64",) * 2, "bags": ("*i64",) * 2},
        *_plain(_LONG | _SIZED),
        tuples=dict.fromkeys(("starts", "counted", "bags"), 2),
        loose=("count", "columns", "bags"),
    ),
)
"""The rows, in the order of a layer's steps."""
