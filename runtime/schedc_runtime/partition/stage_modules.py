"""The stage modules of a cut model under the model's own parameter names, and what travels between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.shared import SharedParameter


@dataclass(frozen=True, eq=False)
class StageModules:
    """The modules of all stages, as data.

    modules: [stages] module k takes the values named ``values[k - 1]`` (module 0: ``inputs``) as positional
        arguments. It returns a tuple of the values named ``values[k]``; the last module returns the model's output.
        Submodules are the model's own objects under their qualified names: parameters and state_dict keys are equal.
    inputs: names of the arguments of the model's forward that a batch brings.
    values: [stages - 1] names, in the traced model, of the values that cross from stage k to stage k + 1. A value
        that several later stages use passes through the stages between.
    blocks: [stages] qualified names of the blocks of each stage.
    shared: the parameters that several stages use, as they were before any rank got a copy of its own.
    aliases: by name of a module that the model has under several names: the first of them.
    """

    modules: tuple[nn.Module, ...]
    inputs: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    blocks: tuple[tuple[str, ...], ...]
    shared: tuple[SharedParameter, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def stages(self) -> int:
        return len(self.modules)

    def bind(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """The values that enter stage 0, in the order of ``inputs``, from the arguments of a call of the model.

        Positional arguments are taken in that order. Raises `PartitionError` for missing or unknown arguments.
        """
        keyword = dict(kwargs or {})
        bound = dict(zip(self.inputs, args, strict=False)) | keyword
        twice = [name for name in self.inputs[: len(args)] if name in keyword]
        unknown = [name for name in keyword if name not in self.inputs]
        missing = [name for name in self.inputs if name not in bound]
        if twice or unknown or missing or len(args) > len(self.inputs):
            raise PartitionError(
                f"the batch brings {len(args)} positional arguments and {sorted(keyword) or 'no keywords'}, but the"
                f" model was partitioned for the arguments {list(self.inputs)}",
                "arguments left out when partitioning keep their defaults; name all that a batch brings:"
                " partition(model, stages, inputs=[...])",
            )
        return tuple(bound[name] for name in self.inputs)

    def release_others(self, keep: Iterable[int]) -> None:
        """Move the parameters and buffers of all stages except ``keep`` to the meta device, which frees their memory.

        Boundaries can still be inferred. This changes the partitioned model, whose modules are the stages'.
        """
        kept = {id(module) for stage in keep for module in self.modules[stage].modules()}
        for stage in self.modules:
            for module in stage.modules():
                if id(module) not in kept:
                    _to_meta(module)


def _to_meta(module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to("meta"))
