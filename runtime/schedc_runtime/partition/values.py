"""Answers what a forward asks of the values of tensors while it is recorded, where these are known.

    attention_mask (all ones) --> .all() --> bool(...)  True: the recording holds for masks of ones
    arange(T) --> diff != 1 --> any() --> bool(...)     False: it follows from no batch

Known are constants that the model makes, and tensors of the batch of which a fact is known. The value that is asked for
is computed from them, with real tensors, through the recorded operations.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree

from schedc_runtime.partition.boundary import KnownValues
from schedc_runtime.partition.structure import storage_of
from schedc_runtime.partition.symbols import Values, settled

KNOWN = "known"
"""Key in the meta of a tensor of the batch: the `KnownValues` of its values."""

_FAKE = re.compile(r"FakeTensor\([^()]*(\([^()]*\))?[^()]*\)")
"""How a fake shows itself in the message of a check."""


class AskingRecorder(Protocol):
    """What `plain_branches` needs of a recorder. unit: path of the unit that is being called; "" between units."""

    unit: str
    values: AskedValues


class Question(NamedTuple):
    """A question that known values have answered. ask: the answer for other sizes."""

    ask: Callable[[Values], Any]
    answer: Any


class AskedValues:
    """What is known of the values in a recording.

    asked: gets the names of the arguments whose values were asked for, whether they were known or not.
    nodes: the node of each tensor, by its id.
    """

    def __init__(self, graph: fx.Graph, asked: set[str], nodes: Mapping[int, fx.Node]) -> None:
        self.graph, self.asked, self.nodes = graph, asked, nodes
        self.sizes: Values = {}
        """The sizes of the recording, if it has symbols for them. Other sizes must have the same answers."""
        self.questions: list[Question] = []

    def note(self, argument: Any, known: Sequence[KnownValues | None]) -> None:
        """What is known of the leaves of an argument, in order."""
        for leaf, fact in zip(pytree.tree_leaves(argument), known, strict=False):
            if isinstance(leaf, Tensor) and fact is not None:
                self.nodes[id(leaf)].meta[KNOWN] = fact

    def knows(self, tensor: Any) -> bool:
        """Whether the values of a tensor are known."""
        node = self.nodes.get(id(tensor))
        return node is not None and self._sources(node) is not None

    def read(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a function that needs values; None where these are not known.

        A tensor is a fake of the shape that follows from the values. None where sizes are symbols, and for one that
        shares memory with what the function was given: the recorder would not see a write through the other.
        """
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        if not all(map(self.knows, given)):
            return None
        nodes = {id(tensor): self.nodes[id(tensor)] for tensor in given}

        def ask(sizes: Values) -> Any:
            with unset_fake_temporarily():
                real = {key: self._value(node, sizes) for key, node in nodes.items()}
                form = pytree.tree_map_only(Tensor, lambda tensor: real[id(tensor)], (tuple(args), dict(kwargs)))
                own, keywords = settled(form, sizes)
                answer = func(*own, **keywords)
                return None if _storages(answer) & _storages((own, keywords)) else answer

        answer = ask(self.sizes)
        if self.sizes and any(map(_is_tensor, pytree.tree_leaves(answer))):
            return None
        self.questions += [Question(ask, answer)] if self.sizes else []
        return pytree.tree_map_only(Tensor, torch.empty_like, answer)

    def _sources(self, node: fx.Node) -> set[fx.Node] | None:
        """The nodes from which the value of ``node`` follows; None if one of them is not known."""
        sources, open_nodes, known = {node}, [node], True
        while open_nodes:
            each = open_nodes.pop()
            if each.meta.get(KNOWN) is not None:
                self._note(each)
                continue
            if each.op != "call_function" or each.meta.get("random"):
                self._note(each)
                known = False
            new = [source for source in each.all_input_nodes if source not in sources]
            sources.update(new)
            open_nodes += new
        return sources if known else None

    def _note(self, node: fx.Node) -> None:
        base = node.meta.get("part_of", node)
        if base.op == "placeholder":
            self.asked.add(base.meta["argument"])

    def _value(self, node: fx.Node, sizes: Values) -> Tensor:
        """The value of a node that is known. All that it follows from runs anew, in order: writes are repeated."""
        sources = self._sources(node)
        assert sources is not None
        values: dict[fx.Node, Any] = {}
        for each in self.graph.nodes:
            if each not in sources:
                continue
            if (known := each.meta.get(KNOWN)) is not None:
                like = each.meta["val"]
                values[each] = known.tensor(settled(tuple(like.shape), sizes), like)
            else:
                args, kwargs = settled(fx.map_arg((each.args, each.kwargs), values.__getitem__), sizes)
                values[each] = each.target(*args, **kwargs)
        value = values[node]
        assert isinstance(value, Tensor)
        return value


@contextmanager
def plain_branches(recorder: AskingRecorder) -> Iterator[None]:
    """Lets code between units that asks whether it is traced take the branch of a plain call, where values are known.

    Transformers asks whether a tensor is a fake, and takes masks of all rows and columns for those. Checks of values
    become part of the recording.
    """
    library: Any = sys.modules.get("transformers.utils.import_utils")
    is_fake, check_all = getattr(library, "is_fake_tensor", None), torch._check_tensor_all_with

    def known(value: Any) -> bool:
        return not recorder.unit and recorder.values.knows(value)

    def recorded(error_type: Any, condition: Any, message: Any = None) -> None:
        if isinstance(condition, FakeTensor):
            if not recorder.unit:  # a unit checks by itself whenever it runs
                told = str(message() if callable(message) else message or "a check of the model fails")
                handle_torch_function(checked, (condition,), condition, _FAKE.sub("(of the microbatch)", told))
        else:
            check_all(error_type, condition, message)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "_check_tensor_all_with", recorded))
        if is_fake is not None:
            asked = mock.patch.object(library, "is_fake_tensor", lambda value: is_fake(value) and not known(value))
            stack.enter_context(asked)
        yield


def checked(condition: Tensor, message: str) -> Tensor:
    """``condition`` [...]. Fails where a value of it is false, on a device by itself: the host does not wait."""
    torch._assert_async(condition.all(), message)
    return condition


def facts_of(tensors: Iterable[tuple[Tensor, int | None]]) -> list[KnownValues | None]:
    """[tensors] what is known of the values of each. The host waits once for a device that has some of them.

    Known are masks, flags and positions: 0 everywhere, 1 everywhere, or counting from 0 or 1 along the last dimension,
    unless that has the rows. What is known of a batch is then known of each of its microbatches.
    tensors: [...] each with the dimension of its rows; None for none.
    """
    columns = [_column(tensor, rows) for tensor, rows in tensors]
    asked = [column for column in columns if column is not None]
    answers = iter(torch.stack([column.to(asked[0].device) for column in asked]).tolist() if asked else [])
    return [None if column is None else _fact(*next(answers)) for column in columns]


def _column(tensor: Tensor, rows: int | None) -> Tensor | None:
    """[4] whether ``tensor`` is 0, is 1, counts from 0, and counts from 1; None for one that is not looked at."""
    floating = tensor.dtype.is_floating_point
    if tensor.is_meta or not tensor.numel() or not tensor.dim() or (floating and tensor.dim() > 2):
        return None
    count = torch.arange(tensor.shape[-1], device=tensor.device)
    counts = [torch.zeros((), device=tensor.device)] * 2
    if tensor.dtype != torch.bool and not floating and tensor.shape[-1] > 1 and rows != tensor.dim() - 1:
        counts = [(tensor == count + first).all() for first in (0, 1)]
    return torch.stack([(tensor == 0).all().float(), (tensor == 1).all().float(), *(x.float() for x in counts)])


def _fact(*answers: float) -> KnownValues | None:
    facts = (KnownValues(False, 0), KnownValues(False, 1), KnownValues(True, 0), KnownValues(True, 1))
    return next((fact for fact, holds in zip(facts, answers, strict=True) if holds), None)


def _storages(value: Any) -> set[int]:
    return {storage_of(leaf) for leaf in pytree.tree_leaves(value) if _is_tensor(leaf)}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
