"""The tables ``[[kernels]]`` of a cost file: who multiplies rows of experts fastest, by the rows of an expert."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite

from schedc.diagnostics import Diagnostic, Label, did_you_mean
from schedc.source import Source
from schedc.step.costs.checks import problem_in

KERNEL_PROVIDERS = ("bmm", "grouped", "loop", "padded", "triton")
"""Providers of products that round nothing."""

DTYPES = ("bfloat16", "float16", "float32", "float64")
LARGEST = 1 << 40
"""Largest size and number of rows; more is a mistake of the writer."""

_SIZES = ("experts", "width", "inner")
_KEYS = (*_SIZES, "dtype", "padded", "buckets")
_BUCKET = '{rows = [1, 8], provider = "loop", ms = {loop = 0.1, grouped = 0.2}}'


@dataclass(frozen=True)
class KernelBucket:
    """Who multiplies where an expert has from ``low`` to ``high`` rows, by the mean over the experts.

    times: (provider, milliseconds) as they were measured, forward and backward together; empty where nobody measured.
    """

    low: int
    high: int
    provider: str
    times: tuple[tuple[str, float], ...] = ()

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The provider of the bucket, then the others that were measured, fastest first."""
        others = sorted((time, name) for name, time in self.times if name != self.provider)
        return (self.provider, *(name for _, name in others))


@dataclass(frozen=True)
class KernelFamily:
    """The buckets of one shape, ascending: so many experts of a rank, columns of a row, inner columns, and a dtype.

    padded: rows have static shapes, as many for each expert, as under a `capacity`.
    """

    experts: int
    width: int
    inner: int
    dtype: str
    padded: bool
    buckets: tuple[KernelBucket, ...]

    @property
    def shape(self) -> tuple[int, int, int, str, bool]:
        return (self.experts, self.width, self.inner, self.dtype, self.padded)

    @cached_property
    def _ends(self) -> list[int]:
        """[buckets - 1] the most rows that each bucket serves. Rows between two buckets go to the nearer."""
        return [(left.high + right.low) // 2 for left, right in pairwise(self.buckets)]

    def bucket(self, rows: int) -> KernelBucket:
        """The bucket of this many rows of an expert; a neighbour's where nobody measured them."""
        return self.buckets[bisect_left(self._ends, rows)]


def read_kernels(value: object, source: Source) -> tuple[tuple[KernelFamily, ...], list[Diagnostic]]:
    """The families of parsed tables ``[[kernels]]``, and findings (S401, S402) about the others."""
    if not isinstance(value, list) or not all(isinstance(table, Mapping) for table in value):
        message = "`kernels` is no list of tables"
        return (), [problem_in(source, "kernels", "", "S402", message, "write [[kernels]] above each of them")]
    families: list[KernelFamily] = []
    for index, table in enumerate(value):
        family = _read_family(table)
        if isinstance(family, KernelFamily) and any(family.shape == other.shape for other in families):
            family = ("S402", "experts", "two tables of `kernels` have one shape", "leave one of the two out")
        if not isinstance(family, KernelFamily):
            code, key, message, help = family
            key, _, bucket = key.partition(" ")
            finding = problem_in(source, "kernels", key, code, message, help, index)
            return (), [_at_bucket(finding, source, int(bucket)) if bucket else finding]
        families.append(family)
    return tuple(families), []


_Wrong = tuple[str, str, str, str]
"""Code, key, message and help of what is wrong. The key of a bucket is ``buckets`` with its number."""


def _at_bucket(finding: Diagnostic, source: Source, number: int) -> Diagnostic:
    """The finding about a list of buckets at the bucket with this number."""
    span = finding.primary.span
    depth, begin = 0, sum(len(line) + 1 for line in source.lines[: span.line - 1]) + span.column - 1
    for place in range(begin, len(source.text)):
        character = source.text[place]
        number -= character == "{" and depth == 0
        depth += {"{": 1, "}": -1}.get(character, 0)
        if number < 0:
            end = source.text.find("}", place) + 1
            return replace(finding, primary=Label(source.span_at(place, end or len(source.text))))
    return finding


def _read_family(table: Mapping[str, object]) -> KernelFamily | _Wrong:
    for key in table:
        if key not in _KEYS:
            return "S401", key, f"`kernels` has no `{key}`", did_you_mean(key, _KEYS)
    sizes: list[int] = []
    for key in _SIZES:
        size = _whole(table.get(key), 1)
        if size is None:
            return "S402", key, _told(key, table, "a whole number from 1"), f"write {key} = 8"
        sizes.append(size)
    dtype, padded, buckets = table.get("dtype"), table.get("padded", False), table.get("buckets")
    if dtype not in DTYPES:
        return "S402", "dtype", _told("dtype", table, "a dtype"), f"one of {', '.join(DTYPES)}"
    if not isinstance(padded, bool):
        return "S402", "padded", _told("padded", table, "true or false"), "true: with a `capacity`"
    if not isinstance(buckets, list) or not buckets:
        return "S402", "buckets", _told("buckets", table, "a list of buckets"), f"write buckets = [{_BUCKET}]"
    read: list[KernelBucket] = []
    for number, bucket in enumerate(buckets):
        row = _read_bucket(bucket)
        if not isinstance(row, KernelBucket):
            return row[0], f"buckets {number}", row[1], f"a bucket is {_BUCKET}"
        if read and row.low <= read[-1].high:
            message = f"a bucket of {row.low} to {row.high} rows behind one of {read[-1].low} to {read[-1].high}"
            return "S402", f"buckets {number}", message, "buckets ascend and do not overlap"
        read.append(row)
    experts, width, inner = sizes
    return KernelFamily(experts, width, inner, str(dtype), padded, tuple(read))


def _read_bucket(bucket: object) -> KernelBucket | tuple[str, str]:
    """The bucket, or code and message of what is wrong."""
    if not isinstance(bucket, Mapping):
        return "S402", f"a bucket is {bucket!r}"
    for key in bucket:
        if key not in ("rows", "provider", "ms"):
            return "S401", f"a bucket has no `{key}`"
    rows, provider, times = bucket.get("rows"), bucket.get("provider"), bucket.get("ms", {})
    ends = [_whole(end, 0) for end in rows] if isinstance(rows, list) and len(rows) == 2 else []
    low, high = (*ends, None, None)[:2]
    if low is None or high is None or low > high:
        return "S402", f"`rows` of a bucket is {rows!r}, not [least, most]"
    for name in (provider, *(times if isinstance(times, Mapping) else ())):
        if name not in KERNEL_PROVIDERS:
            return "S402", f"`{name}` multiplies no rows: known here are {', '.join(KERNEL_PROVIDERS)}"
    if not isinstance(times, Mapping):
        return "S402", f"`ms` of a bucket is {times!r}"
    figures: dict[str, float] = {}
    for name, time in times.items():
        if isinstance(time, bool) or not isinstance(time, int | float) or not (isfinite(time) and time >= 0):
            return "S402", f"`{name}` took {time!r} ms"
        figures[name] = float(time)
    return KernelBucket(low, high, str(provider), tuple(sorted(figures.items())))


def _whole(value: object, least: int) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
    return int(value) if whole else None  # type: ignore[call-overload]


def _told(key: str, table: Mapping[str, object], what: str) -> str:
    return f"`{key}` of `kernels` is {table[key]!r}, not {what}" if key in table else f"`kernels` says no `{key}`"


def write_kernels(families: Iterable[KernelFamily]) -> list[str]:
    """The lines of the tables; `read_kernels` gives back equal values."""
    lines: list[str] = []
    for family in families:
        lines += [
            "",
            "[[kernels]]",
            *(f"{key} = {getattr(family, key)}" for key in _SIZES),
            f'dtype = "{family.dtype}"',
        ]
        lines += ["padded = true"] * family.padded + ["buckets = ["]
        for bucket in family.buckets:
            times = ", ".join(f"{name} = {time!r}" for name, time in bucket.times)
            lines.append(
                f'  {{rows = [{bucket.low}, {bucket.high}], provider = "{bucket.provider}", ms = {{{times}}}}},'
            )
        lines.append("]")
    return lines
