"""Reads a model that torch's `parallelize_module` has placed: its styles become ours, and its weights whole again.

    torch's style         placed                      here
    ColwiseParallel       Linear, rows of the weight  colwise, or colwise_gather_output for a whole result
    RowwiseParallel       Linear, columns             rowwise, or rowwise_split_input for a whole input
    RowwiseParallel       Embedding, rows             embedding_rowwise
    SequenceParallel      a norm                      replicate
    PrepareModule...      nothing                     nothing: exchanges around cores take its place

Hooks of these styles are taken off, so that none of torch's collectives is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from schedc_runtime.errors import RuntimeFault

_PREPARES = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")
_STYLES = ("ColwiseParallel", "RowwiseParallel", "SequenceParallel", *_PREPARES)
_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class _Hook(NamedTuple):
    """A hook of a style. style: its class. layouts: placements of the tensor that the hook takes or gives.

    local: whether the hook gives a plain tensor.
    """

    table: str
    key: int
    style: str
    layouts: tuple[Any, ...] = ()
    local: bool = True


class _Placed(NamedTuple):
    """A module with hooks or parameters of torch's styles. weight: the placement of the weight, or None."""

    path: str
    module: nn.Module
    hooks: tuple[_Hook, ...]
    weight: Any

    @property
    def style(self) -> str:
        return self.hooks[0].style if self.hooks else ""

    def layout(self, table: str) -> Any:
        """The placement of the module's input, or of its result."""
        return next((hook.layouts[0] for hook in self.hooks if hook.table == table and hook.layouts), None)

    @property
    def local(self) -> bool:
        return all(hook.local for hook in self.hooks)


def take_placed(model: nn.Module) -> dict[str, str]:
    """The styles of a model that torch has placed, by path; empty for others. All parameters become whole and plain.

    A collective of the ranks of torch's mesh. Raises `RuntimeFault`, before anything is changed, for what has no style
    here, with module and placement.
    """
    if not is_placed(model):
        return {}
    if meta := next((name for name, each in model.named_parameters() if each.is_meta), ""):
        raise RuntimeFault(
            f"torch has placed a model whose `{meta}` is on the meta device",
            "give the model before `parallelize_module`, and `tensor_plan`; `Pipeline.materialize` makes the parts",
        )
    _check_tie(model)
    placed = [each for name, module in model.named_modules() if (each := _read(name, module)) is not None]
    cores = _paths_of_cores(placed)
    styles = {each.path: style for each in placed if (style := _style(each, cores))}
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for each in placed:
        for hook in each.hooks:
            _take_off(each.module, hook)
    for module in model.modules():
        vars(module).pop("_distribute_module_applied", None)
        _make_whole(module, whole)
    return styles


def is_placed(model: nn.Module) -> bool:
    """Whether torch has placed any parameter."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _read(path: str, module: nn.Module) -> _Placed | None:
    own = [(name, p.placements) for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)]
    hooks = tuple(_hooks(path, module))
    if not own and not hooks:
        return None
    if several := next(((name, where) for name, where in own if len(where) > 1), None):
        raise _refusal(f"{path}.{several[0]}", several[1], "on a mesh of several axes", "take the axis `tp` alone")
    return _Placed(path, module, hooks, dict(own).get("weight", (None,))[0])


def _hooks(path: str, module: nn.Module) -> Iterator[_Hook]:
    for table in _TABLES:
        for key, hook in getattr(module, table).items():
            origin = getattr(hook, "__module__", "") or ""
            if not origin.startswith("torch.distributed.tensor"):
                continue
            cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
            call = next((cells[name].cell_contents for name in ("input_fn", "output_fn") if name in cells), hook)
            name, _, _ = getattr(call.func if isinstance(call, partial) else call, "__qualname__", "").partition(".")
            if name not in _STYLES:
                raise RuntimeFault(
                    f"`{path}` has a hook of {name or origin}, a style that a pipeline does not carry out",
                    f"use {', '.join(_STYLES[:3])}, or give the whole model and `tensor_plan`",
                )
            given = call.args if isinstance(call, partial) else ()
            yield _Hook(table, key, name, given[0] if given else (), given[-1] is not False if given else True)


def _paths_of_cores(placed: list[_Placed]) -> tuple[str, ...]:
    """The smallest module around each product in columns that has a product in rows, too."""
    rows = [each.path for each in placed if each.style == "ColwiseParallel"]
    homes = []
    for end in (each.path for each in placed if each.style == "RowwiseParallel" and isinstance(each.module, nn.Linear)):
        home = end.rpartition(".")[0]
        while home and not any(path.startswith(f"{home}.") for path in rows):
            home = home.rpartition(".")[0]
        homes.append(home)
    return tuple(homes)


def _style(each: _Placed, cores: tuple[str, ...]) -> str:
    """Our style of a module; "" for one without parameters."""
    kind, linear = each.style, isinstance(each.module, nn.Linear)
    taken, given = (each.layout(table) for table in _TABLES)
    if each.weight is None or kind in ("", *_PREPARES, "SequenceParallel"):
        shard = next((p.placements for p in each.module.parameters(recurse=False) if _is_shard(p)), None)
        if shard is not None:
            raise _refusal(each.path, shard, "without a style of torch", "place it with ColwiseParallel")
        return "" if kind in _PREPARES else "replicate"
    if kind == "ColwiseParallel" and linear and each.weight == Shard(0):
        inside = any(each.path.startswith(f"{core}.") for core in cores if core)
        if given == Replicate() or (_is_columns(given) and not inside and not each.local):
            return "colwise_gather_output"
        if _is_columns(given) and inside:
            return "colwise"
    if kind == "RowwiseParallel" and linear and each.weight == Shard(1) and not _is_columns(given):
        if _is_columns(taken):
            return "rowwise"
        if taken == Replicate():
            return "rowwise_split_input"
    if kind == "RowwiseParallel" and isinstance(each.module, nn.Embedding) and each.weight == Shard(0):
        return "embedding_rowwise"
    what = f"{kind} from {taken} to {given} of an nn.{type(each.module).__name__}"
    raise _refusal(each.path, (each.weight,), f"({what})", "give the whole model, not parallelized, and `tensor_plan`")


def _is_shard(parameter: Any) -> TypeGuard[DTensor]:
    return isinstance(parameter, DTensor) and parameter.placements != (Replicate(),)


def _is_columns(layout: Any) -> bool:
    """Whether a layout of [batch, S, width] splits the last dimension."""
    return layout in (Shard(-1), Shard(2))


def _check_tie(model: nn.Module) -> None:
    """Refuse a tied table that torch has placed as two: each would train alone."""
    names = ("get_input_embeddings", "get_output_embeddings")
    table, head = (getattr(getattr(model, name, lambda: None)(), "weight", None) for name in names)
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False) and table is not head:
        raise RuntimeFault(
            "the model ties its embedding to its head, and torch has placed them as two tables",
            "give the whole model, not parallelized, and `tensor_plan`; or set tie_word_embeddings=False",
        )


def _take_off(module: nn.Module, hook: _Hook) -> None:
    getattr(module, hook.table).pop(hook.key)
    for options in _OPTIONS:
        getattr(module, options).pop(hook.key, None)


@torch.no_grad()
def _make_whole(module: nn.Module, whole: dict[nn.Parameter, nn.Parameter]) -> None:
    """Plain tensors in place of those that torch has placed. whole: by what torch had placed."""
    for name, parameter in list(module._parameters.items()):
        if isinstance(parameter, DTensor):
            if parameter not in whole:
                whole[parameter] = nn.Parameter(_full(parameter), requires_grad=parameter.requires_grad)
            module.register_parameter(name, whole[parameter])
    for name, buffer in list(module._buffers.items()):
        if isinstance(buffer, DTensor):
            module._buffers[name] = _full(buffer)


def _full(tensor: DTensor) -> Tensor:
    """The whole of a DTensor [...]. A collective of the ranks of its mesh."""
    return tensor.full_tensor().detach().clone()


def _refusal(path: str, placements: Any, why: str, help: str) -> RuntimeFault:
    where = ", ".join(map(repr, placements))
    return RuntimeFault(f"torch has placed `{path}` as {where} {why}, which a pipeline does not carry out", help)
