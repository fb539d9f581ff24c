"""Reads a plan of styles against a model: which modules are split how, and the cores around which ranks exchange.

A plan is a dict from a name with `*` for numbers to a style, as the ``base_model_tp_plan`` of Transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.exchange import RoutingLayer


class Split(Enum):
    """Which part of a product a rank has."""

    ROWS = "rows of the weight: columns of the result"
    COLUMNS = "columns of the weight: a part of a sum"


class SplitStyle(NamedTuple):
    """What a style says. split: None for a module that every rank holds whole.

    whole_outside: whether ranks have the whole result of a split in rows, or the whole input of a split in columns.
    outside: whether the module lies outside of cores.
    """

    split: Split | None = None
    whole_outside: bool = False
    outside: bool = False


STYLES = {
    "colwise": SplitStyle(Split.ROWS),
    "rowwise": SplitStyle(Split.COLUMNS),
    "colwise_gather_output": SplitStyle(Split.ROWS, whole_outside=True),
    "rowwise_split_input": SplitStyle(Split.COLUMNS, whole_outside=True),
    "replicated_with_grad_allreduce": SplitStyle(),
    "replicate": SplitStyle(),
    "mla_kv_a_proj": SplitStyle(),
    "embedding_rowwise": SplitStyle(outside=True),
}
"""The styles that a pipeline carries out."""


_ADDED = {
    "deepseek_v3": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.q_b_proj": "colwise",
        "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "model.layers.*.self_attn.kv_b_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }
}
"""By model type: the styles of attention that a model's own plan lacks, as other models with MLA have them."""
_REPLACED = frozenset(["experts", "shared_experts", "gate", "gate_proj", "up_proj", "down_proj"])
"""The modules of a block's MLP that a `MoELayer` takes the place of, in Transformers."""


class StyledModule(NamedTuple):
    """A module that a plan names. style: its name, as in the plan."""

    path: str
    module: nn.Module
    style: str

    @property
    def split(self) -> Split | None:
        """Which part of the product a rank has."""
        return STYLES[self.style].split


@dataclass(frozen=True)
class Core:
    """The smallest module that holds a run from rows to columns: an attention, an MLP.

    into: its products split in rows. out: the last product, split in columns, whose result is the core's. exchanges:
    whether exchanges lie inside.
    """

    path: str
    into: tuple[StyledModule, ...]
    out: StyledModule
    exchanges: bool = False

    @property
    def opened(self) -> bool:
        """Whether exchanges lie inside of the core, which is then recorded through."""
        return self.exchanges or any(STYLES[each.style].whole_outside for each in (*self.into, self.out))


def styles_of(model: nn.Module, given: Mapping[str, str] | None) -> Mapping[str, str]:
    """The plan that was given, else what of the model's own fits its modules. Raises `RuntimeFault` without one.

    A family's plan names what some of its models lack, such as the router of those with experts.
    """
    own = given if given is not None else getattr(model, "_tp_plan", None)
    if given is None and isinstance(own, Mapping):
        added = _ADDED.get(getattr(getattr(model, "config", None), "model_type", ""), {})
        names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
        own = {pattern: style for pattern, style in {**own, **added}.items() if _fits(names, pattern)}
    if not isinstance(own, Mapping) or not own:
        raise RuntimeFault(
            f"the mesh splits products over tensor ranks, and {type(model).__name__} has no plan of styles",
            'pass Pipeline(tensor_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})',
        )
    return own


def paths_of_experts(model: nn.Module) -> list[str]:
    """The paths of layers that send rows by their values."""
    return [name for name, module in model.named_modules() if isinstance(module, RoutingLayer)]


def dense_styles(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The plan without the styles of what a `MoELayer` has taken the place of: experts are whole on their rank."""
    paths = paths_of_experts(model)
    layers, inside = [path.split(".") for path in paths], tuple(f"{path}." for path in paths)
    names = [name for name, _ in model.named_modules() if not name.startswith(inside)]

    def of_experts(pattern: str) -> bool:
        words = pattern.split(".")
        replaced = any(
            len(words) > len(layer) and words[len(layer)] in _REPLACED and all(map(fnmatchcase, layer, words))
            for layer in layers
        )
        return replaced and not _fits(names, pattern)

    return {pattern: style for pattern, style in plan.items() if not of_experts(pattern)}


def _fits(names: Iterable[str], pattern: str) -> bool:
    return any(_matches(name, pattern) for name in names)


def cores_of(styled: Sequence[StyledModule], head: str) -> tuple[Core, ...]:
    """The cores among the modules of a plan, in their order. head: path of the layer that makes logits.

    Raises `RuntimeFault` for a core that does not close.
    """
    split = [each for each in styled if each.split is not None and each.path != head]
    ends = [each for each in split if each.split is Split.COLUMNS]
    homes = {end.path: _home(end.path, split) for end in ends}
    cores = []
    for path in dict.fromkeys(homes.values()):
        inside = [each for each in split if each.path.startswith(f"{path}.")]
        last = [each for each in inside if each.split is Split.COLUMNS]
        if len(last) > 1:
            raise _open_core(path, f"`{last[0].path}` and `{last[1].path}` both end it")
        cores.append(Core(path, tuple(each for each in inside if each.split is Split.ROWS), last[0]))
    held = {each.path for core in cores for each in (*core.into, core.out)}
    if lone := next((each for each in split if each.path not in held), None):
        raise _open_core(lone.path, f"its style `{lone.style}` begins a core, and no product in columns ends it")
    return tuple(cores)


def styled_modules(model: nn.Module, plan: Mapping[str, str]) -> Iterator[StyledModule]:
    """The modules that a plan names, in the order of the model.

    Raises `RuntimeFault` for a style that is not carried out, and for a name that fits nothing.
    """
    modules = dict(model.named_modules())
    for pattern, style in plan.items():
        fits = _fits(modules, pattern)
        if style not in STYLES and (fits or _is_parameter(model, pattern)):
            raise RuntimeFault(
                f"the plan of styles has `{pattern}: {style}`, and a pipeline does not carry out the style `{style}`",
                "replace expert layers by ours, which stay whole: schedc_runtime.moe.huggingface.swap_experts(model);"
                " or, for a family that it does not know, take one tensor rank"
                if "experts" in pattern.split(".")
                else f"write one of {', '.join(STYLES)}; or take one tensor rank for this model",
            )
        if not fits and _is_parameter(model, pattern):
            raise RuntimeFault(
                f"the plan of styles splits the parameter `{pattern}` ({style}), which is no module",
                "take one tensor rank for this model: a pipeline splits products and tables of the vocabulary",
            )
        if not fits:
            raise RuntimeFault(
                f"the plan of styles names `{pattern}`, and {type(model).__name__} has no such module",
                "write names as in model.named_modules(), with * in place of numbers",
            )
    for name, module in modules.items():
        if style := next((style for pattern, style in plan.items() if _matches(name, pattern)), ""):
            plain = type(module) is nn.Linear or hasattr(getattr(module, "weight", None), "tensor_parallel")
            if STYLES[style].split is not None and not plain:
                raise RuntimeFault(
                    f"the plan of styles splits `{name}` ({style}), a {type(module).__name__} and no nn.Linear",
                    "leave it out of the plan: it then stays whole, and its core must have no other product",
                )
            yield StyledModule(name, module, style)


def _matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern word by word."""
    words, wanted = name.split("."), pattern.split(".")
    return len(words) == len(wanted) and all(map(fnmatchcase, words, wanted))


def _is_parameter(model: nn.Module, pattern: str) -> bool:
    return any(_matches(name, pattern) for name, _ in model.named_parameters())


def _home(path: str, split: Sequence[StyledModule]) -> str:
    """The path of the smallest module around a product in columns that has a product in rows, too."""
    home = path
    while home := home.rpartition(".")[0]:
        if any(each.split is Split.ROWS and each.path.startswith(f"{home}.") for each in split):
            return home
    raise _open_core(path, "its style ends a core, and no product in rows begins it")


def _open_core(path: str, why: str) -> RuntimeFault:
    return RuntimeFault(
        f"the plan of styles has a core that does not close at `{path}`: {why}",
        "give a core products in rows (colwise) and one product in columns (rowwise), which ends it",
    )


def head_of(model: nn.Module, plan: Mapping[str, str]) -> str:
    """The path of the layer that makes logits, as the model says it; else what the plan calls a gathered `head`.

    Raises `RuntimeFault` where neither does.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    if output is not None:
        return next(name for name, module in modules if module is output)
    gathered = [pattern for pattern, style in plan.items() if style == "colwise_gather_output" and "*" not in pattern]
    if len(gathered) != 1 or gathered[0] not in dict(modules):
        raise RuntimeFault(
            f"neither {type(model).__name__} nor the plan of styles names the head, before which rows are collected",
            'write it into the plan, as {"head": "colwise_gather_output"}: each tensor rank has a part of it',
        )
    return gathered[0]
