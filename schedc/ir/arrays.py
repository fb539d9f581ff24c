"""Types of arrays, and numpy's functions that take counts and indexes, for arrays of any integer type.

numpy wants counts and indexes as `intp`. It has 64 bits on most machines and 32 on others, such as a browser's
WebAssembly. There numpy refuses an int64 count or index, although its value fits.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Int8 = npt.NDArray[np.int8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

Scalar = TypeVar("Scalar", bound=np.generic)
Integers = npt.NDArray[np.integer[Any]] | npt.NDArray[np.bool_]


def repeat(values: npt.NDArray[Scalar], counts: Integers | list[int] | int) -> npt.NDArray[Scalar]:
    """`numpy.repeat`: each value as often as its count says. values, counts: [n], or counts a scalar."""
    return np.repeat(values, as_index(counts))


def bincount(values: Integers, weights: npt.NDArray[Any] | None = None, minlength: int = 0) -> npt.NDArray[Any]:
    """`numpy.bincount`: how often each value occurs, or the sum of its weights. values, weights: [n]."""
    return np.bincount(as_index(values), weights, minlength)


def reduceat(ufunc: np.ufunc, values: npt.NDArray[Any], starts: Integers, axis: int = 0) -> npt.NDArray[Any]:
    """``ufunc.reduceat``: reduces the slices of ``values`` along ``axis`` that begin at ``starts`` [slices]."""
    result: npt.NDArray[Any] = ufunc.reduceat(values, as_index(starts), axis=axis)
    return result


def as_index(values: Integers | list[int] | int) -> npt.NDArray[np.intp]:
    """The values, of any shape, in the type of numpy's indexes; copied only where they have another."""
    return np.asarray(values).astype(np.intp, copy=False)


def distinct(codes: npt.NDArray[np.integer[Any]], limit: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[distinct] the distinct codes, ascending, and [n] the position of each code among them.

    codes: [n], each in 0 ..< ``limit``.

    `numpy.unique` sorts; for a limit no larger than the number of codes, marking them is faster.
    """
    if limit > codes.size:
        ascending, position = np.unique(codes, return_inverse=True)
        return ascending.astype(np.int64), position.astype(np.int64)
    occurs = np.zeros(limit, bool)
    occurs[codes] = True
    number = np.cumsum(occurs, dtype=np.int64) - 1
    return np.flatnonzero(occurs).astype(np.int64), number[codes]
