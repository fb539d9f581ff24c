"""The stage modules of a cut model, the parameters that several of them use, and copies for different ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from schedc.ir.placement import Placement
from schedc.ir.ties import Tie, lies_apart
from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.refusals import home


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages use. uses: each stage, ascending, with its names for the parameter."""

    uses: tuple[tuple[int, tuple[str, ...]], ...]

    @property
    def name(self) -> str:
        """The parameter's name in errors, norms and files: the first name of the first stage."""
        return self.uses[0][1][0]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that use the parameter, ascending."""
        return tuple(stage for stage, _ in self.uses)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once, in the order of stages."""
        return tuple(dict.fromkeys(name for _, names in self.uses for name in names))

    def of(self, modules: Mapping[int, nn.Module]) -> nn.Parameter | None:
        """The copy of the rank that holds ``modules``, by stage; None if no stage there uses it."""
        return next((modules[stage].get_parameter(names[0]) for stage, names in self.uses if stage in modules), None)


def first_names(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter: the name under which `model.named_parameters()` has the parameter."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def shared_parameters(modules: Sequence[nn.Module]) -> tuple[SharedParameter, ...]:
    """The parameters that several stages use, in the order of their first uses. modules: [stages]."""
    uses: dict[int, dict[int, list[str]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            uses.setdefault(id(parameter), {}).setdefault(stage, []).append(name)
    several = [by_stage for by_stage in uses.values() if len(by_stage) > 1]
    return tuple(
        SharedParameter(tuple((stage, tuple(names)) for stage, names in by_stage.items())) for by_stage in several
    )


def tied_apart(shared: Sequence[SharedParameter], placement: Placement) -> tuple[SharedParameter, ...]:
    """The shared parameters whose stages lie on several ranks."""
    return tuple(parameter for parameter in shared if lies_apart(Tie(parameter.stages), placement))


def copies_in(modules: Mapping[int, nn.Module], tied: Sequence[SharedParameter]) -> list[nn.Parameter]:
    """The copies of the rank that holds ``modules``, by stage, of those parameters that a stage there uses."""
    return [copy for copy in (parameter.of(modules) for parameter in tied) if copy is not None]


def refuse_tied(modules: Sequence[nn.Module], shared: Sequence[SharedParameter], placement: Placement | None) -> None:
    """Raise `PartitionError` for tied weights whose copies could not be kept equal. modules: [stages]."""
    for parameter in tied_apart(shared, placement) if placement is not None else ():
        assert placement is not None
        uses = " and ".join(f"`{names[0]}` ({home(stage, placement)})" for stage, names in parameter.uses)
        if placement.pipes > 1:
            raise PartitionError(
                f"tied weights: {uses} are one parameter. The schedule has two copies of each stage, and these stages"
                " do not share both ranks: four ranks would have to sum each other's gradients",
                "take a schedule with one copy of each stage, as zbv, dualpipev or interleaved_1f1b; or: choose"
                " split_points that put both uses into stages of the same ranks",
            )
        tensor = parameter.of(dict(enumerate(modules)))
        if tensor is not None and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
            raise PartitionError(
                f"tied weights: {uses} are one parameter, and this parameter has a hook. Each rank"
                " would call the hook with the gradient of its own use, not with the sum",
                "remove the hook, and change the gradients after `step`, which sums them",
            )


def ties_of(tied: Sequence[SharedParameter], modules: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """What the compiler has to know of them: one tie for all parameters that the same stages use. modules: [stages]."""
    size: dict[tuple[int, ...], int] = {}
    for parameter in tied:
        tensor = parameter.of(dict(enumerate(modules)))
        size[parameter.stages] = size.get(parameter.stages, 0) + (tensor.nbytes if tensor is not None else 0)
    return tuple(Tie(stages, size[stages]) for stages in sorted(size))


def give_copies(places: Sequence[Mapping[int, nn.Module]], tied: Sequence[SharedParameter]) -> None:
    """Give each place in this process its own copy of a parameter that another place here has.

    places: the stage modules of each place, by stage, which are changed. The model's own modules stay as they are: a
    stage gets copies of those that hold the parameter.
    """
    for parameter in tied:
        owners: dict[int, int] = {}
        for place, modules in enumerate(places):
            original = parameter.of(modules)
            if original is not None and owners.setdefault(id(original), place) != place:
                own = copy.deepcopy(original)
                for stage, names in parameter.uses:
                    if stage in modules:
                        _replace(modules[stage], names, own)


def _replace(root: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Put ``parameter`` under the ``names`` of ``root``, in shallow copies of the modules on the way to it."""
    copies: dict[int, nn.Module] = {}
    for name in names:
        *path, last = name.split(".")
        owner = root
        for part in path:
            child = owner.get_submodule(part)
            if id(child) not in copies:
                duplicate = copy.copy(child)
                duplicate._modules, duplicate._parameters = dict(child._modules), dict(child._parameters)
                copies[id(child)] = copies[id(duplicate)] = duplicate
            owner._modules[part] = copies[id(child)]
            owner = copies[id(child)]
        owner._parameters[last] = parameter


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
    losses: the stages that form a loss, ascending: the last alone, or one for each output of the model.
    aliases: by name of a module that the model has under several names: the first of them. first_names: the same of
        parameters, of each name.
    """

    modules: tuple[nn.Module, ...]
    inputs: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    blocks: tuple[tuple[str, ...], ...]
    shared: tuple[SharedParameter, ...] = ()
    losses: tuple[int, ...] = field(kw_only=True)
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
