"""Checks the record of evidence, ``evidence.json``. A stranger may have written it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from schedc.ir.program import Program
from schedc_runtime.audit.fitness import ALIKE

_LARGEST = 1 << 31
"""Most numbers of a tensor in a batch that is made for a signature."""
_FORMS = {
    None, "builtins.list", "builtins.tuple", "builtins.dict", "collections.OrderedDict", "collections.namedtuple",
    "collections.deque",
}  # fmt: skip
"""Kinds of nodes of targets. torch would import the module that a ``defaultdict`` names."""
_TEXTS = ("suspect", "row", "verdict")
_DIGESTS = ("weights", "given")
_SETTINGS: Mapping[str, tuple[type, ...]] = {
    "seed": (int,), "rng": (str,), "split_points": (list,), "segmented": (bool,), "blocks": (str, type(None)),
    "inputs": (list, type(None)), "compiled": (bool,),
}  # fmt: skip
_JOB: Mapping[str, tuple[type, ...]] = {
    "microbatch": (int,), "key": (list,), "defer": (bool,), "first": (bool,), "target": (list, type(None)),
    "loss_scale": (int, float), "weight": (int, float, type(None)), "head_scale": (int, float),
}  # fmt: skip


def check_record(facts: Mapping[str, Any], program: Program) -> None:
    """Raise `ValueError` for a field that no run writes. program: that of the evidence."""
    for name in _TEXTS:
        _hold(type(facts.get(name)) is str, name)
    _hold(_is_count(facts.get("step")), "step")
    _hold(_is_count(facts.get("stage"), program.stages), "stage")
    for name in _DIGESTS:
        _hold(_are_digests(facts.get(name)), name)
    witnesses, devices = facts.get("witnesses"), facts.get("devices")
    _hold(isinstance(witnesses, dict) and all(map(_are_digests, witnesses.values())), "witnesses")
    assert isinstance(witnesses, dict)
    _hold(facts["suspect"] in witnesses, "suspect")
    _hold(isinstance(devices, dict) and bool(devices) and all(map(_is_device, devices.values())), "devices")
    _hold("signature" in facts, "signature")
    _check_signature(facts["signature"], 0)
    _check_fields(facts.get("settings"), _SETTINGS, "settings")
    _check_fields(facts.get("job"), _JOB, "job")
    _check_settings(facts["settings"])
    _check_job(facts["job"], program)


def _hold(right: bool, name: str) -> None:
    if not right:
        raise ValueError(f"`{name}` is missing, or of another type")


def _is_count(value: Any, below: int = 1 << 63) -> bool:
    return type(value) is int and 0 <= value < below


def _are_digests(value: Any) -> bool:
    return isinstance(value, dict) and all(type(each) is str for each in value.values())


def _is_device(value: Any) -> bool:
    if not (isinstance(value, dict) and set(ALIKE) <= value.keys()):
        return False
    return _is_count(value["threads"], 1 << 12) and value["threads"] > 0


def _check_fields(value: Any, kinds: Mapping[str, tuple[type, ...]], name: str) -> None:
    _hold(isinstance(value, dict), name)
    for key, kind in kinds.items():
        _hold(key in value and type(value[key]) in kind, f"{name}.{key}")
        _hold(type(value[key]) is not float or math.isfinite(value[key]), f"{name}.{key}")


def _check_settings(settings: Mapping[str, Any]) -> None:
    _hold(_is_count(abs(settings["seed"])), "settings.seed")
    _hold(settings["rng"] in ("by name", "torch"), "settings.rng")
    for name in ("split_points", "inputs"):
        _hold(all(type(each) in (str, type(None)) for each in settings[name] or ()), f"settings.{name}")


def _check_job(job: Mapping[str, Any], program: Program) -> None:
    _hold(_is_count(job["microbatch"], program.microbatches), "job.microbatch")
    *numbers, call = job["key"] or [None]
    whole = all(type(each) is int and _is_count(abs(each)) for each in numbers)
    _hold(len(numbers) == 3 and whole and call in ("step", "evaluate"), "job.key")
    if (target := job["target"]) is None:
        return
    _hold(len(target) == 5 and all(map(_is_count, target[:3])), "job.target")
    *_, plain, form = target
    _hold(isinstance(plain, list) and all(each is None or _is_plain(each) for each in plain), "job.target")
    _hold(type(form) is str, "job.target")
    if others := set(_forms(json.loads(form))) - _FORMS:
        raise ValueError(f"a target is a {sorted(map(str, others))[0]}, and torch would import what that names")


def _is_plain(value: Any) -> bool:
    """Whether a leaf of targets is one that is no tensor: a list of it alone."""
    return isinstance(value, list) and len(value) == 1 and type(value[0]) in (bool, int, float, str, type(None))


def _forms(value: Any) -> Iterator[str | None]:
    """The kinds of all nodes of targets. value: as `torch.utils._pytree.treespec_dumps` writes it."""
    if isinstance(value, dict):
        if "children_spec" in value:
            kind = value.get("type")
            yield kind if kind is None or isinstance(kind, str) else "?"
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _forms(each)


def _check_signature(value: Any, depth: int) -> None:
    """``value`` has the form of `signature_of`, and a batch of it can be made."""
    if value is None:
        return
    _hold(isinstance(value, dict) and depth < 32, "signature")
    if "shape" in value:
        shape, dtype = value["shape"], getattr(torch, str(value.get("dtype")), None)
        _hold(isinstance(shape, list) and all(map(_is_count, shape)) and math.prod(shape) <= _LARGEST, "signature")
        _hold(isinstance(dtype, torch.dtype) and type(value["dtype"]) is str, "signature")
        return
    if "items" in value or "fields" in value:
        inner = value.get("items", value.get("fields"))
        _hold(isinstance(inner, list if "items" in value else dict), "signature")
        for each in inner if "items" in value else inner.values():
            _check_signature(each, depth + 1)
        return
    _hold(type(value.get("value")) in (bool, int, float, str), "signature")
