"""A model whose products tensor ranks split: the plan of styles, the cores, and the exchanges around cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from schedc_runtime.partition.recorded_stage import RecordedStage
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.tensor_parallel.exchanges import own_part
from schedc_runtime.tensor_parallel.insertion import Insertion
from schedc_runtime.tensor_parallel.shard import shard_model
from schedc_runtime.tensor_parallel.styles import (
    cores_of,
    dense_styles,
    head_of,
    paths_of_experts,
    styled_modules,
    styles_of,
)
from schedc_runtime.tensor_parallel.token_slices import in_token_slices
from schedc_runtime.tensor_parallel.vocabulary import Vocabulary, by_loss, shard_vocabulary, vocabulary_of


class SplitProducts:
    """This rank's part of a model. The weights of all stages are split when it is made.

    plan: styles by name; None for the model's own. group: the tensor ranks. multiplied: path of the head that the loss
    multiplies by; "" for a loss of logits. context: the ranks that share each sequence, if any. The tensor ranks may
    then be one: the model has the exchanges, and all of its products. token_slices: the most slices of tokens.

    Raises `RuntimeFault`, on every rank alike, for a plan or sizes that are not carried out.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[str, str] | None,
        group: ExpertGroup,
        multiplied: str = "",
        context: ExpertGroup | None = None,
        token_slices: int = 1,
    ) -> None:
        self._model, self.group, self._token_slices = model, group, token_slices
        self.styles = dense_styles(model, styles_of(model, plan))
        styled = list(styled_modules(model, self.styles))
        self.head = head_of(model, self.styles)
        self.cores = cores_of(styled, self.head)
        if context is not None:
            from schedc_runtime.tensor_parallel.context import open_attentions

            self.cores = open_attentions(model, self.cores, context)
        split = vocabulary_of(model, {each.path: each.style for each in styled}, self.head)
        self.vocabulary = by_loss(split if group.size > 1 else Vocabulary(), self.head, multiplied)
        shard_model(model, self.cores, group.size, group.rank)
        shard_vocabulary(model, self.vocabulary, group.size, group.rank)
        for parameter in model.parameters() if group.size == 1 else ():
            vars(parameter).pop("tensor_parallel", None)  # the whole is no part

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """The shape [...] of the whole tensor of which the model's entry ``name`` is this rank's part."""
        dim, size, _ = self._part(self._model, name)
        return torch.Size([count * size if d == dim else count for d, count in enumerate(shape)])

    def own_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole tensors [...], as ``module`` loads them."""
        parts = {name: self._part(module, name) for name in state}
        return {name: value if parts[name][0] < 0 else own_part(value, *parts[name]) for name, value in state.items()}

    def whole_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors [...] of the parts that the tensor ranks hold. A collective of these."""
        communicator, whole = self.group.expert, dict(state)
        for name, value in state.items():
            if (dim := self._part(module, name)[0]) >= 0:
                parts = communicator.wait(communicator.all_gather(value.detach(), "state"))
                whole[name] = torch.cat(list(parts), dim)
        return whole

    @staticmethod
    def _part(module: nn.Module, name: str) -> tuple[int, int, int]:
        """(dimension, ranks, rank) of an entry of a module's state; the dimension is -1 for what is whole."""
        owner, _, own = name.rpartition(".")
        part: tuple[int, int, int] = getattr(getattr(module.get_submodule(owner), own), "tensor_parallel", (-1, 1, 0))
        return part

    @property
    def opened(self) -> frozenset[str]:
        """The paths of cores with exchanges inside."""
        return frozenset(core.path for core in self.cores if core.opened)

    def units(self, module: nn.Module) -> list[str]:
        """The paths in a stage of what torch.compile may make one graph of: cores, and layers of experts."""
        paths = {name for name, _ in module.named_modules()}
        return [core.path for core in self.cores if core.path in paths] + paths_of_experts(module)

    def slice_tokens(self, modules: Sequence[nn.Module], slices: Sequence[int]) -> None:
        """Let recorded stages run in slices of tokens. slices: [stages]; empty for whole sequences."""
        for module, count in zip(modules, slices, strict=False):
            if isinstance(module, RecordedStage) and count > 1:
                module.rewrite = partial(in_token_slices, count=count)

    def insertion(self, units: Sequence[str]) -> Insertion:
        """What is inserted while the model is recorded. units: paths of its blocks."""
        return Insertion(self._model, self.cores, units, self.head, self.group, self.vocabulary, self._token_slices)
