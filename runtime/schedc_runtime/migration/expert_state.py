"""What belongs to the experts of a layer on one rank: weights, gradients, optimizers' states, and tensors of a trainer.

All of it has a row for each expert, so that an expert can move to another rank with everything that is its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import MoELayer


class ExpertState(NamedTuple):
    """What belongs to the experts of a layer on this rank.

    tensors: by name, [local, ...] each. numbers: values for all experts together, such as an optimizer's step.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]

    @property
    def bytes_of_expert(self) -> int:
        """Bytes of one expert, with all tensors."""
        return sum(tensor.nbytes // len(tensor) for tensor in self.tensors.values())

    @property
    def digests(self) -> list[str]:
        """[2] texts that are equal on all ranks of the layer: of the tensors' kinds, and of the numbers."""
        kinds = {name: [str(each.dtype), *each.shape[1:]] for name, each in self.tensors.items()}
        return [digest_of(kinds), digest_of(self.numbers)]


def expert_state(
    name: str, layer: MoELayer, optimizers: Sequence[Optimizer], extra: Sequence[Mapping[str, Tensor]]
) -> ExpertState:
    """What belongs to the experts of the layer ``name`` here. extra: further tensors by name of the parameter.

    Raises `RuntimeFault` for what cannot move with an expert.
    """
    state = ExpertState({}, {})
    for own, parameter in layer.experts.named_parameters():
        key = f"{name}.experts.{own}" if name else f"experts.{own}"
        given = {key: parameter.detach()}
        if parameter.grad is not None:
            given[f"{key}, the gradient"] = parameter.grad
        given |= {f"{key}, extra {number}": part[key] for number, part in enumerate(extra) if key in part}
        owners = [each for each in optimizers if any(parameter is other for other in _parameters(each))]
        if parameter.requires_grad and optimizers and not owners:
            raise RuntimeFault(f"no optimizer here has `{key}`", "give rebalance all optimizers of this process")
        for optimizer in owners:
            for slot, value in optimizer.state.get(parameter, {}).items():
                _sort(f"{key}, {slot} of {type(optimizer).__name__}", value, parameter, given, state.numbers)
        for what, tensor in given.items():
            _check_rows(what, tensor, parameter)
        state.tensors.update(given)
    return state


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _sort(what: str, value: Any, parameter: Tensor, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Put an entry of an optimizer's state among tensors or numbers."""
    if isinstance(value, Tensor) and (value.shape == parameter.shape or value.numel() > 1):
        tensors[what] = value
    elif isinstance(value, Tensor):
        numbers[what] = value.item()
    elif value is None or isinstance(value, (bool, int, float, str)):
        numbers[what] = value
    else:
        raise RuntimeFault(f"`{what}` is a {type(value).__name__}", "only tensors and numbers can move with an expert")


def _check_rows(what: str, tensor: Any, parameter: Tensor) -> None:
    """Raise `RuntimeFault` unless ``tensor`` has a row for each expert of ``parameter`` [local, ...]."""
    if isinstance(tensor, DTensor) or isinstance(parameter, DTensor):
        raise RuntimeFault(f"`{what}` is sharded, and experts move as a whole", "leave experts out of `fully_shard`")
    if not isinstance(tensor, Tensor) or tensor.shape != parameter.shape:
        shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise RuntimeFault(
            f"`{what}` has the shape {shape}, and the parameter {list(parameter.shape)}: no row of it is an expert's",
            "use an optimizer whose states have the shape of the parameter, such as AdamW, or leave experts where they"
            " are",
        )


def digest_of(value: Any) -> str:
    """A short text that tells values (JSON) apart."""
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
