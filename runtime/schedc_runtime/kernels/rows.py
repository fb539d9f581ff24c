"""What a row of the registry of kernels says, and which compute capabilities kernels are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CAPABILITIES = (80, 90, 100)
"""Compute capabilities that every kernel is compiled for, as Triton writes them: 90 is 9.0."""

PRODUCTS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
"""By capability: the instruction that multiplies matrices of bfloat16."""


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel.

    dtype: Triton's word for the elements of pointers whose type is ``*T``. fixed: values of arguments that the compiler
    knows; None for a tensor that is not given. ``columns.1`` is the second entry of the tuple ``columns``. warps: of 32
    threads each. loose: whether strides and sizes are any numbers, not multiples of 16.
    capabilities: what it is compiled for.
    """

    name: str
    dtype: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    loose: bool = False
    capabilities: tuple[int, ...] = CAPABILITIES


@dataclass(frozen=True)
class KernelRow:
    """One kernel.

    launch: takes the arguments of ``twin``. pointers: types of pointers, by argument; other arguments are int32.
    tuples: number of entries of arguments that are tuples; a variant may have fewer. loose: arguments, or entries of
    tuples, that are any number or address. bits: whether its results in float32 have the bits of the
    twin; without them, ``why`` says what differs, and ``bound`` how far, over the norm. vectors: the least number of
    loads of 16 bytes in each variant that is not loose. multiplies: whether it multiplies matrices.
    launches: of a call, with fills of memory.
    """

    name: str
    kernel: str
    launch: str
    twin: str
    pointers: Mapping[str, str | tuple[str, ...]]
    variants: tuple[Variant, ...]
    tuples: Mapping[str, int] = field(default_factory=dict)
    long: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()
    bits: bool = True
    why: str = ""
    bound: float = 0.0
    vectors: int = 0
    multiplies: bool = False
    launches: int = 1
