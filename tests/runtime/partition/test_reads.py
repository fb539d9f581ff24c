"""What a trainer changes between steps is recorded anew or refused; what changes nothing is not."""

from __future__ import annotations

import cProfile
import functools
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.errors import PartitionError
from schedc_runtime.partition import partition
from schedc_runtime.partition.records import Records
from support.needs import needs
from support.sweeps import halved

FOLDER = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(FOLDER))

from trainers import stale  # noqa: E402

pytestmark = pytest.mark.slow

WIDTH = 4
ROWS = torch.ones(2, WIDTH)
REFUSED = {
    "a parameter": "`gain` of Model was replaced",
    "a block": "`blocks.1` of Model was replaced",
    "a counter in the forward": r"(?s)reads `calls` between its units, and each forward changes it.*stale.py:\d+: ",
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", halved(stale.CASES))
def test_a_change_between_steps_is_recorded_anew_or_refused(name: str) -> None:
    entry = stale.case(name)
    assert entry["right"], entry
    if name in REFUSED:
        with pytest.raises(PartitionError, match=REFUSED[name]):
            raise PartitionError(entry["reason"], "")
    else:
        assert (entry["happened"], entry["recordings"]) == ("recorded anew", 1)


class Reading(nn.Module):
    """Blocks; ``tail`` is the code behind them."""

    def __init__(self, tail: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.tail = tail
        self.value: Any = 1.0
        self.kept: Any = None
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tail(self, x)


class Slotted:
    """An object without a dict."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Settings(dict[str, float]):
    """A dict whose keys are attributes."""

    __getattr__ = dict.__getitem__


class Magic:
    """An object with its own lookup of attributes."""

    def __init__(self) -> None:
        object.__setattr__(self, "fields", {"value": 1.0})

    def __getattribute__(self, name: str) -> Any:
        fields = object.__getattribute__(self, "fields")
        return fields[name] if name in fields else object.__getattribute__(self, name)


LEVELS = {0: 1.0}


def helper() -> float:
    return LEVELS[0]


def decorated(function: Callable[[Any, Tensor], Tensor]) -> Any:
    @functools.wraps(function)
    def wrapper(self: Any, x: Tensor) -> Tensor:
        return function(self, x) * wrapper.factor  # type: ignore[attr-defined, no-any-return]

    wrapper.factor = 1.0  # type: ignore[attr-defined]
    return wrapper


def importing(_self: Any, x: Tensor) -> Tensor:
    from trainers import stale as module

    return x * module.SCALE


def recorded(tail: Callable[[Any, Tensor], Tensor], value: Any = 1.0) -> tuple[Any, Records]:
    model = Reading(tail)
    model.value = value
    return model, partition(model, 2, example=ROWS).records


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any, Callable[[Any, pytest.MonkeyPatch], Any]]] = {
    "a slot": (lambda m, x: x * m.value.value, Slotted(), lambda m, _: setattr(m.value, "value", 2.0)),
    "a key": (lambda m, x: x * m.value.scale, Settings(scale=1.0), lambda m, _: m.value.update(scale=2.0)),
    "magic": (lambda m, x: x * m.value.value, Magic(), lambda m, _: object.__getattribute__(m.value, "fields").clear()),
    "an array": (lambda m, x: x * float(m.value[0]), np.ones(2), lambda m, _: m.value.fill(2)),
    "a set": (lambda m, x: x * len(m.value), {1, 2}, lambda m, _: m.value.add(3)),
    "in a tuple": (lambda m, x: x * m.value[0][0], ([1.0],), lambda m, _: m.value[0].append(2)),
    "through vars": (lambda m, x: x * vars(m)["value"], 1.0, lambda m, _: setattr(m, "value", 2.0)),
    "a partial": (
        lambda m, x: m.value(x), functools.partial(torch.mul, other=2),
        lambda m, _: setattr(m, "value", functools.partial(torch.mul, other=3)),
    ),
    "a global of a helper": (lambda _, x: x * helper(), None, lambda _, patch: patch.setitem(LEVELS, 0, 2.0)),
    "a function": (
        lambda _, x: x * helper(), None, lambda _, patch: patch.setattr(sys.modules[__name__], "helper", lambda: 2.0)
    ),
    "an import": (importing, None, lambda _, patch: patch.setattr(stale, "SCALE", 2.0)),
    "an attribute of a decorator": (
        decorated(lambda _, x: x), None, lambda m, _: setattr(m.tail, "factor", 2.0)
    ),
    "the environment": (
        lambda _, x: x * float(os.environ.get("SCALE_OF_THE_TEST", "1")), None,
        lambda _, patch: patch.setenv("SCALE_OF_THE_TEST", "2"),
    ),
    "a hook of all modules": (
        lambda _, x: x, None,
        lambda m, _: setattr(m, "kept", nn.modules.module.register_module_forward_hook(lambda *_: None)),
    ),
    "an attribute that is gone": (
        lambda m, x: x * getattr(m, "value", 2.0), 1.0, lambda m, _: delattr(m, "value")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_values_are_compared_by_what_they_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tail, value, change = CHANGES[name]
    model, records = recorded(tail, value)
    records.reads.refresh()
    before = records.reads.key(True)
    change(model, monkeypatch)
    records.reads.refresh()
    if isinstance(model.kept, torch.utils.hooks.RemovableHandle):
        model.kept.remove()
    assert records.reads.key(True) != before


@pytest.mark.parametrize("name", ["a closure", "the defaults of a method", "a list in a global dict"])
def test_changes_are_seen_beside_another_profiler(name: str) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        entry = stale.case(name)
        assert sys.getprofile() is profiler
    finally:
        profiler.disable()
    assert (entry["right"], entry["happened"]) == (True, "recorded anew")


def test_values_that_come_back_find_their_recording() -> None:
    model, records = recorded(lambda m, x: x * m.value)
    for value, recordings in [(1.0, 1), (float(2), 2), (1.0, 2), (2.0, 2), (3.0, 3)]:
        model.value = value
        records.of((ROWS,), {}, training=True)
        assert records.recordings == recordings


def _kept(model: Any, x: Tensor) -> Tensor:
    if model.length != x.shape[-1]:
        model.kept, model.length = torch.arange(x.shape[-1]), x.shape[-1]
    return x + model.kept


def test_what_a_forward_keeps_for_the_next_one_is_put_back() -> None:
    with pytest.warns(UserWarning, match="sets `kept`, `length` between its units"):
        model, records = recorded(_kept)
    assert (model.kept, model.length) == (None, 0)
    records.of((ROWS,), {}, training=True)
    assert records.recordings == 1


def test_what_is_counted_and_not_read_changes_nothing() -> None:
    def counting(model: Any, x: Tensor) -> Tensor:
        model.length += 1
        return x

    with pytest.warns(UserWarning, match="sets `length` between its units"):
        model, records = recorded(counting)
    model.length = 7
    records.of((ROWS,), {}, training=True)
    assert records.recordings == 1


def test_a_change_of_contents_between_units_is_a_warning() -> None:
    def counting(model: Any, x: Tensor) -> Tensor:
        model.value["calls"] += 1
        return x * model.value["calls"]

    with pytest.warns(UserWarning, match="changes what is in `value` between its units"):
        recorded(counting, {"calls": 0})


def test_what_cannot_be_compared_is_named_once() -> None:
    with pytest.warns(UserWarning, match=r"(?s)reads `value` between its units, a list_iterator.*test_reads.py:\d+: "):
        _, records = recorded(lambda m, x: x * next(m.value), iter([1.0] * 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records.of((torch.ones(3, WIDTH),), {}, training=True)
    assert records.recordings == 2


def test_a_value_that_changes_again_and_again_is_a_warning() -> None:
    model, records = recorded(lambda m, x: x * m.value)
    for value in range(3):
        model.value = value
        records.of((ROWS,), {}, training=True)
    model.value = 3
    with pytest.warns(UserWarning, match="has changed 4 times, `value` the last time"):
        records.of((ROWS,), {}, training=True)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_a_new_buffer_reaches_all_copies_of_a_stage(schedule: str) -> None:
    torch.manual_seed(0)
    model = stale.Model().double()
    rows = torch.randn(8, WIDTH, dtype=torch.float64)
    loss_fn = nn.functional.mse_loss
    pipe = Pipeline(model, schedc.compile(schedule, P=2, M=4), loss_fn=loss_fn, in_process=True, example=rows)
    pipe.step(rows, rows)
    model.scale = torch.full((WIDTH,), 3.0, dtype=torch.float64)
    pipe.step(rows, rows)
    model.scale = torch.full((WIDTH,), 2.0, dtype=torch.float64)
    assert torch.allclose(pipe.step(rows, rows), loss_fn(model(rows), rows))
    assert torch.allclose(pipe.evaluate(rows, rows), loss_fn(model.eval()(rows), rows))
    pipe.close()


@needs("transformers")
def test_a_family_of_transformers_is_recorded_once() -> None:
    from trainers import families

    family = families.FAMILIES["llama"]
    batch = families.batch(family, 12, masked=True)
    model = families.make(family).train()
    program = schedc.compile("1f1b", P=2, M=4)
    pipe = Pipeline(model, program, loss_fn=families.loss_fn, in_process=True, example=batch)
    first = []
    for factor in (1.0, 1.0, 1.0, 2.0):
        model.config.num_hidden_layers = 4
        model.model.rotary_emb.attention_scaling = factor
        pipe.step(batch, torch.zeros(families.ROWS, dtype=family.dtype))
        first.append(pipe.partition.records.recordings)
    assert first == [1, 1, 1, 2]
    pipe.close()


_STARTED, _TOOK = 0.0, 0.0


def _collected(phase: str, info: dict[str, int]) -> None:
    """As the callback of hypothesis, which measures how long collections take."""
    global _STARTED, _TOOK
    if phase == "start":
        _STARTED = time.perf_counter()
    else:
        _TOOK += time.perf_counter() - _STARTED


def test_callbacks_of_the_garbage_collector_are_not_the_model_s() -> None:
    threshold = gc.get_threshold()
    gc.callbacks.append(_collected)
    gc.set_threshold(1)
    try:
        _, records = recorded(lambda m, x: x * len([[] for _ in range(100)]))
        assert gc.isenabled()
        records.of((ROWS,), {}, training=True)
    finally:
        gc.callbacks.remove(_collected)
        gc.set_threshold(*threshold)
    assert records.recordings == 1


def test_parts_of_a_namespace_are_reached() -> None:
    model, records = recorded(lambda m, x: x * m.value.inner.scale, SimpleNamespace(inner=SimpleNamespace(scale=1.0)))
    model.value.inner.scale = 2.0
    records.of((ROWS,), {}, training=True)
    assert records.recordings == 2
