"""The stage modules of a cut model under the model's own parameter names, and what travels between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from schedc_runtime.partition.shared import SharedParameter


@dataclass(frozen=True, eq=False)
class StageModules:
    """The modules of all stages, as data.

    modules: [stages] module k takes the values named ``values[k - 1]`` (module 0: ``inputs``) as positional
        arguments. It returns a tuple of the values named ``values[k]``; the last module returns the model's output.
        Submodules are the model's own objects under their qualified names: parameters and state_dict keys are equal.
    inputs: names of the arguments of the model's forward, in the example that the model was cut with.
    values: [stages - 1] names, in that example, of the values that cross from stage k to stage k + 1. A value that
        several later stages use passes through the stages between.
    blocks: [stages] qualified names of the blocks of each stage.
    shared: the parameters that several stages use, as they were before any rank got a copy of its own.
    aliases: by name of a module that the model has under several names: the first of them. first_names: the same of
        parameters, of each name.
    """

    modules: tuple[nn.Module, ...]
    inputs: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    blocks: tuple[tuple[str, ...], ...]
    shared: tuple[SharedParameter, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    first_names: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def stages(self) -> int:
        return len(self.modules)

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
