"""The records of a partitioned model, one per input signature and mode, with the code of every stage."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc_runtime.errors import BoundaryError, PartitionError
from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.partition.cut_record import CutModel, Record
from schedc_runtime.partition.effects import ambient
from schedc_runtime.partition.example import arguments, guesses, named_arguments
from schedc_runtime.partition.forms import Form
from schedc_runtime.partition.output_stages import OutputStages
from schedc_runtime.partition.reads import Reads
from schedc_runtime.partition.record import NodeRule, modules_outside, record
from schedc_runtime.partition.recorded_stage import CodeSlot, RecordedStage, attribute_of, equip, graft
from schedc_runtime.partition.recorder import Recording
from schedc_runtime.partition.split import CutRecording, Entries, Homes
from schedc_runtime.partition.symbols import Places, sizes_of_symbols
from schedc_runtime.random_numbers.names import aliases_of

_KEPT = 256
"""Records kept: batches of changing length must not use ever more memory."""
_FORMS = 32
"""Forms of batches kept, each with its recordings."""


class Records:
    """Records a model anew for every signature, and cuts it at the same places.

    wanted: names of units and split points. entered: [entries] their names in the order in which the model runs.
    cuts: [stages - 1] entries before each cut. slots: [stages] where the current code of each stage is.
    outputs: the stages of the model's outputs, where a layout with predictions says them.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: NodeRule,
        inputs: Sequence[str] | None,
        wanted: frozenset[str],
        entered: tuple[str, ...],
        cuts: Sequence[int],
        outputs: OutputStages | None = None,
    ) -> None:
        self.model, self.rule, self.inputs, self.outputs = model, rule, inputs, outputs
        self.aliases = aliases_of(model)
        self.wanted, self.entered, self.cuts = wanted, entered, tuple(cuts)
        self.homes = Homes(model, entered, cuts)
        self.slots = tuple(CodeSlot() for _ in range(len(cuts) + 1))
        self.first: Record | None = None
        self.current: Record | None = None
        self.recordings = 1
        """How often the model has run on fake tensors."""
        self._kept: OrderedDict[str, Record] = OrderedDict()
        self._forms: OrderedDict[str, Form] = OrderedDict()
        self.reads = Reads(model, {name: model.get_submodule(name) for name in modules_outside(model, rule)})
        self.asked: dict[tuple[str, ...], frozenset[str]] = {}
        """By names of a call's arguments: the names whose values a recording asked for."""
        self._orders: dict[tuple[int, tuple[str, ...]], dict[str, int]] = {}
        """By number of positional arguments and keywords of a call: the order in which the values enter stage 0."""
        self._homes: dict[str, object] = {}
        """By path: the parameters, and the modules with parameters, that stages hold."""

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool, slices: int = 1) -> Record:
        """The record of a microbatch; a `TensorSpec` may replace a tensor. training: the mode around units.

        slices: how many of them make a microbatch, if this is a slice. Its fewer rows are no change of sizes.
        """
        named = named_arguments(self.model, args, kwargs, self.inputs)
        self.reads.refresh()
        key = self._key(named, training)
        if key not in self._kept:
            record = self._new(named, training, slices)
            key = self._key(named, training)  # values that were asked for count from now on
            self._kept[key] = record
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def ordered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of a call in the order in which they enter stage 0."""
        values = (*args, *kwargs.values())
        return tuple([values[position] for position in self._positions(args, kwargs).values()])

    def entering(self, batches: Sequence[Any]) -> list[tuple[Any, ...]]:
        """[batches] as `ordered`, for at least one batch, all with the same arguments and tuples in place of lists."""
        args, kwargs = arguments(batches[0])
        places = list(self._positions(args, kwargs).values())
        if not kwargs and places == list(range(len(args))):
            return list(batches) if isinstance(batches[0], tuple) else [(batch,) for batch in batches]
        return [self.ordered(*arguments(batch)) for batch in batches]

    def _positions(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """By name, in order: the position of each argument of a call among its values, ``kwargs`` behind ``args``."""
        form = (len(args), tuple(kwargs))
        positions = self._orders.get(form)
        if positions is None:
            keywords = {name: position for position, name in enumerate(kwargs, len(args))}
            positions = self._orders[form] = named_arguments(self.model, range(len(args)), keywords, self.inputs)
        return positions

    def select(self, record: Record) -> None:
        """Let all stages run the code of a record from now on."""
        self.current = record
        for slot, code in zip(self.slots, record.codes, strict=True):
            slot.code = code

    def stage_modules(self) -> tuple[RecordedStage, ...]:
        """[stages] new modules with the submodules, parameters and buffers that the current codes use."""
        modules = tuple(RecordedStage(slot) for slot in self.slots)
        for module in modules:
            module.training = self.model.training
            self.equip(module)
        if head := self.rule.head:  # the last stage hands it to the loss
            graft(modules[-1], head, self.model.get_submodule(head))
        return modules

    def equip(self, module: nn.Module) -> None:
        """Give a stage module, or a copy of one, what its current code reads and an earlier code did not.

        These are buffers and modules without parameters: `of` has compared the parameters.
        """
        if isinstance(module, RecordedStage):
            equip(module, self.model)

    def keep_first(self, recording: Recording, named: Mapping[str, Any], *, guessed: bool) -> Record:
        """Cut the first recording, which decides the parameters of each stage. It was made in the model's mode.

        guessed: whether its sizes are not those of a batch.
        """
        self.first = self._cut(recording, named).record(named, {})
        with torch.enable_grad():  # as it was recorded
            self._note_asked(recording, named)
            if not guessed:
                form = Form()
                form.begin(sizes_of_symbols(pytree.tree_leaves(dict(named))), recording)
                self._keep_form(form, named, self.model.training)
            self._kept[self._key(named, self.model.training)] = self.first
        self.select(self.first)
        self.accept()
        return self.first

    @contextmanager
    def changed_by_pipeline(self) -> Iterator[None]:
        """Takes what changes in the model inside for no change: the pipeline does it."""
        self.reads.refresh()
        try:
            yield
        finally:
            self.accept()

    def accept(self) -> None:
        """Take the present model for the recorded model: the pipeline has changed it, and nobody else."""
        self.reads.accept()
        paths = [path for paths in self.first.parameters for path in paths] if self.first else []
        self._homes = {path: attribute_of(self.model, path) for path in paths}

    def values_asked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str | int] | None:
        """The arguments of a call, by position or keyword, whose values recordings ask for; None if not known yet."""
        places, keys = self._positions(args, kwargs), [*range(len(args)), *kwargs]
        asked = self.asked.get(tuple(places))
        return None if asked is None else frozenset(keys[place] for name, place in places.items() if name in asked)

    def _note_asked(self, recording: Recording, named: Mapping[str, Any]) -> None:
        """Note the arguments whose values the recording asked for: only these values count from now on."""
        names = tuple(named)
        self.asked[names] = self.asked.get(names, frozenset()) | recording.asked

    def _new(self, named: Mapping[str, Any], training: bool, slices: int) -> Record:
        def recorded(varying: Places) -> CutModel:
            self.recordings += 1
            device = device_of_record(self.model)
            with warnings.catch_warnings():
                if varying:  # the recording of the first sizes has warned
                    warnings.simplefilter("ignore")
                recording = record(self.model, named, self.rule, training=training, device=device, varying=varying)
            self._note_asked(recording, named)
            return self._cut(recording, named)

        key = self._form_key(named, training, slices)
        form = self._forms.pop(key, None) or Form()
        try:
            model, values = form.model(sizes_of_symbols(pytree.tree_leaves(dict(named))), recorded)
        finally:
            self._keep_form(form, named, training, slices)
        return model.record(named, values)

    def _keep_form(self, form: Form, named: Mapping[str, Any], training: bool, slices: int = 1) -> None:
        """Keep a form, behind recordings that may have asked for other values."""
        self._forms[self._form_key(named, training, slices)] = form
        while len(self._forms) > _FORMS:
            self._forms.popitem(last=False)

    def _form_key(self, named: Mapping[str, Any], training: bool, slices: int) -> str:
        return f"{slices} {self._described(named, training, _kind)}"

    def _key(self, named: Mapping[str, Any], training: bool) -> str:
        return self._described(named, training, _sign)

    def _described(self, named: Mapping[str, Any], training: bool, sign: Callable[[Any], Any]) -> str:
        """What a recording depends on besides the model. Values count where recordings ask for them.

        sign: what counts of a leaf of the arguments in any case.
        """

        def known(leaf: Any) -> Any:
            return sign(leaf), getattr(leaf, "known", None)

        asked = self.asked.get(tuple(named), frozenset(named))
        signs = {name: pytree.tree_map(known if name in asked else sign, value) for name, value in named.items()}
        return f"{signs} {training} {device_of_record(self.model)} {ambient()} {self.reads.key(training)}"

    def _cut(self, recording: Recording, named: Mapping[str, Any]) -> CutModel:
        self.reads.add(recording.reads)
        begins = self.homes.begins(Entries.of(recording, self.wanted))
        cut = CutModel(self.model, CutRecording(recording, begins, self.outputs))
        self._check_homes(cut.parameters, named)
        return cut

    def _check_homes(self, parameters: Sequence[frozenset[str]], named: Mapping[str, Any]) -> None:
        """Refuse a recording in which a stage uses parameters that it does not hold."""
        if self.first is None:
            return
        for path, held in self._homes.items():
            if attribute_of(self.model, path) is not held:
                raise PartitionError(
                    f"`{path}` of {type(self.model).__name__} was replaced: stages and optimizer hold what was there",
                    "write into the parameters that are there, or make a new Pipeline and a new optimizer",
                )
        for stage, (before, now) in enumerate(zip(self.first.parameters, parameters, strict=True)):
            if new := sorted(path for path in now - before if self.homes.lacks(stage, path)):
                raise PartitionError(
                    f"on inputs of the shapes {_shapes(named)} stage {stage} uses `{new[0]}`"
                    f"{f' and {len(new) - 1} more' if len(new) > 1 else ''}, which it does not hold. A stage holds"
                    " the tensors that the example uses there, and tensors registered beside these",
                    "give an example whose forward uses it (Pipeline(..., example=batch)), or register it beside"
                    " units of the stage. For a model that has other units now, make a new Pipeline",
                )


def device_of_record(model: nn.Module) -> torch.device:
    """The device of the parameters that are not on the meta device; the CPU if all are."""
    real = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(real, torch.device("cpu"))


def _sign(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, (Tensor, TensorSpec)) else leaf


def _kind(leaf: Any) -> Any:
    """A tensor without its sizes. Sizes 0 and 1 count: torch computes otherwise with them."""
    if not isinstance(leaf, (Tensor, TensorSpec)):
        return leaf
    return tuple(size if size < 2 else "n" for size in leaf.shape), leaf.dtype


def _shapes(named: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {list(value.shape) if isinstance(value, (Tensor, TensorSpec)) else value}"
        for name, value in named.items()
    )


@torch.enable_grad()
def first_recording(
    model: nn.Module, rule: NodeRule, inputs: Sequence[str] | None, example: Any
) -> tuple[dict[str, Any], Recording]:
    """(arguments by name, recording). Raises `PartitionError` if no guess fits, with what the first one failed of."""
    device = device_of_record(model)
    if example is not None:
        named = named_arguments(model, *arguments(example), inputs)
        return named, record(model, named, rule, training=model.training, device=device)
    failure: BoundaryError | None = None
    for named in guesses(model, inputs):
        try:
            return named, record(model, named, rule, training=model.training, device=device)
        except BoundaryError as error:
            failure = failure or error
    raise PartitionError(
        f"{type(model).__name__} runs on none of the inputs that were guessed from its layers"
        + (f"; the first: {failure.message}" if failure else ""),
        "give a batch as an example, of which only the shapes count: Pipeline(..., example=batch)",
    ) from failure
