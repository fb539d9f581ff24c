"""Inserts exchanges while a model is recorded: around cores, where own rows begin, and at the head.

A core stays one call, between a gather of its input and a scatter of its result. The bias of its last product is added
behind the sum, on each rank's own rows. A core with exchanges inside of it (`Core.opened`) is recorded through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.tensor_parallel.exchanges import (
    ROWS,
    Collect,
    CollectColumns,
    Enter,
    Feature,
    Gather,
    OwnColumns,
    Scatter,
    Sum,
    TensorExchange,
)
from schedc_runtime.tensor_parallel.gradients import Gradients
from schedc_runtime.tensor_parallel.styles import STYLES, Core, Split
from schedc_runtime.tensor_parallel.vocabulary import OwnIds, Vocabulary

if TYPE_CHECKING:
    from schedc_runtime.partition.recorder import ForwardRecorder, Recording

HOME = "tensor_exchanges"
"""The module of a model that has the exchanges among tensor ranks."""
Run = Callable[[Any, Any], Any]
"""Calls a module as it is, with positional arguments and keywords."""


@dataclass
class _OwnRows:
    """What one recording has inserted. inside: whether rows are a rank's own now. ends: results of last products.

    entered: path of the module at whose call own rows began.
    """

    inside: bool = False
    entered: str = ""
    ends: dict[str, Any] = field(default_factory=dict)


class Insertion:
    """The exchanges of one model. They are modules of the model, under `HOME`, so that stages take them along.

    units: paths of blocks; own rows begin at the first of those with a core. head: where they end. token_slices: slices
    that own rows are enough for, or a recording is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        cores: Sequence[Core],
        units: Iterable[str],
        head: str,
        group: ExpertGroup,
        vocabulary: Vocabulary,
        token_slices: int = 1,
    ) -> None:
        self.gradients = Gradients(model, cores, vocabulary)
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._group, self._home, self._now = group, nn.Module(), _OwnRows()
        self._token_slices = token_slices
        blocks = tuple(units)
        self._handlers: dict[str, Callable[[Run, Any, Any], Any]] = {}
        self._ends = {core.out.path for core in cores}
        self._sharing = [core.path for core in cores if core.exchanges]
        enter = self._module("model", "enter", Enter())
        for core in cores:
            self._add_core(core)
        self._styles: dict[str, str] = {}
        for core in cores:
            self._styles.setdefault(_unit(core.path, blocks), f"`{core.into[0].path}: {core.into[0].style}`")
        for path in self._styles:
            self._add(path, self._entering(path, enter))
        self._add(head, self._leaving(head, vocabulary))
        if vocabulary.embedding:
            table = cast(nn.Embedding, model.get_submodule(vocabulary.embedding))
            self._add(vocabulary.embedding, self._looking_up(vocabulary.embedding, table.num_embeddings))
        model.add_module(HOME, self._home)
        self.points = tuple(
            point
            for core in cores
            for point in ((*(each.path for each in core.into), core.out.path) if core.opened else (core.path,))
        )
        """Paths of modules around which the model is recorded through."""

    def finish(self, recording: Recording) -> None:
        """A recording has ended. Raises `PartitionError` where own rows were not collected, or meet."""
        if not self._now.entered or self._now.inside:
            raise PartitionError(
                "own rows of tensor ranks are not collected: "
                + ("the head is not called behind the last core" if self._now.inside else "no core is called"),
                "let the model call its cores and then the head that the plan of styles names, in each forward",
            )
        called = {str(node.target).rpartition(".")[0] for node in recording.graph.nodes if node.op == "call_module"}
        if alone := next((path for path in self._sharing if path not in called), ""):
            raise PartitionError(
                f"`{alone}` attends to a rank's own tokens alone, without a call of its attention function",
                "take a model whose attentions call it in each forward, or Mesh(context=1)",
            )
        self.gradients.read(recording)

    def parted(self) -> str:
        """The block at which own rows began, with its first style; "" where rows are whole."""
        path = self._now.entered
        return f"`{path}` ({self._styles[path]})" if self._now.inside and self._group.size > 1 else ""

    def around(self, recorder: ForwardRecorder) -> Callable[..., Any]:
        """What takes the calls of modules in place of ``recorder.call``. A recording begins."""
        self._now = _OwnRows()

        def call(module: nn.Module, args: Any, kwargs: Any, original: Callable[..., Any]) -> Any:
            path = self._paths.get(id(module), "")

            def run(args: Any, kwargs: Any) -> Any:
                result = recorder.call(module, args, kwargs, original)
                if path in self._ends:
                    self._now.ends[path] = result
                return result

            handler = self._handlers.get(path)
            return run(args, kwargs) if handler is None or recorder.unit else handler(run, args, kwargs)

        return call

    def _module(self, place: str, name: str, module: nn.Module) -> nn.Module:
        """Register what is inserted at a place of the model."""
        if isinstance(module, TensorExchange):
            module.group, module.place = self._group, place
        key = place.replace(".", "_")
        if key not in self._home._modules:
            self._home.add_module(key, nn.Module())
        self._home.get_submodule(key).add_module(name, module)
        return module

    def _add(self, path: str, handler: Callable[[Run, Any, Any], Any]) -> None:
        """Let ``handler`` take the calls of a module, around what takes them already."""
        inner = self._handlers.get(path)
        self._handlers[path] = handler if inner is None else _nested(handler, inner)

    def _add_core(self, core: Core) -> None:
        gather, scatter = (
            self._module(core.path, name, each) for name, each in (("gather", Gather()), ("scatter", Scatter()))
        )
        bias = core.out.module if core.out.module.bias is not None else None

        def handler(run: Run, args: Any, kwargs: Any) -> Any:
            if not self._now.inside:
                raise PartitionError(f"the core `{core.path}` is called behind the head", "call the head last")
            result = run(*_replaced(args, kwargs, lambda own: gather(None, self._sliceable(own))[0], core.path))
            first, rest = (result, None) if isinstance(result, Tensor) else _first(result, core.path)
            _check_end(core, first, self._now.ends.pop(core.out.path, None))
            (own,) = scatter(None, first)
            if bias is not None:
                own = own + bias.bias
            return own if rest is None else (own, *rest)

        self._add(core.path, handler)
        for each in (*core.into, core.out):
            if STYLES[each.style].whole_outside:
                self._add(each.path, self._columns(each.path, each.split is Split.ROWS))

    def _sliceable(self, own: Tensor) -> Tensor:
        """Own rows [B, S/t, H]. Raises `PartitionError` where they are fewer than slices."""
        if own.shape[ROWS] < self._token_slices:
            raise PartitionError(
                f"{own.shape[ROWS]} tokens of a tensor rank do not make {self._token_slices} slices",
                "give longer sequences, or write fewer `slices` of tokens into the plan",
            )
        return own

    def _columns(self, path: str, gathers: bool) -> Callable[[Run, Any, Any], Any]:
        """Gathers the columns that a product gives, or takes the own columns of its input."""
        if gathers:
            feature = self._module(path, "feature", Feature())
            return lambda run, args, kwargs: feature(None, run(args, kwargs))[0]
        own = self._module(path, "own", OwnColumns(self._group.size, self._group.rank))
        return lambda run, args, kwargs: run(*_replaced(args, kwargs, own, path))

    def _entering(self, path: str, enter: nn.Module) -> Callable[[Run, Any, Any], Any]:
        """Own rows begin at the first call of a block."""

        def handler(run: Run, args: Any, kwargs: Any) -> Any:
            now = self._now
            if not now.inside:
                if now.entered:
                    raise PartitionError("a block is called behind the head", "call the head last")
                args, kwargs = _replaced(args, kwargs, lambda whole: enter(None, whole)[0], "the first block")
                now.inside, now.entered = True, path
            return run(args, kwargs)

        return handler

    def _leaving(self, head: str, vocabulary: Vocabulary) -> Callable[[Run, Any, Any], Any]:
        """Own rows end at the head. Columns of the logits are collected behind it, unless the loss takes them."""
        split = bool(vocabulary.head)
        rows = self._module(head, "gather", Gather()) if split else self._module("model", "collect", Collect())
        columns = self._module("model", "collect", CollectColumns()) if split and not vocabulary.columns else None

        def handler(run: Run, args: Any, kwargs: Any) -> Any:
            if self._now.inside:
                args, kwargs = _replaced(args, kwargs, lambda own: rows(None, own)[0], "the head")
                self._now.inside = False
            elif split:
                raise PartitionError("the head is called twice", "call it once, behind the last block")
            logits = run(args, kwargs)
            return logits if columns is None else columns(None, logits)[0]

        return handler

    def _looking_up(self, path: str, count: int) -> Callable[[Run, Any, Any], Any]:
        """Looks up the own ids in the own rows of a table, and sums over ranks. count: own rows."""
        own = self._module(path, "own", OwnIds(self._group.rank * count, count))
        added = self._module(path, "sum", Sum())

        def handler(run: Run, args: Any, kwargs: Any) -> Any:
            if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
                raise PartitionError(f"`{path}` is called with more than ids", "pass the ids alone")
            rows, outside = own(args[0])
            found = run((rows,), {})
            return added(None, found.masked_fill(outside.unsqueeze(-1), 0.0))[0]

        return handler


def _nested(outer: Callable[[Run, Any, Any], Any], inner: Callable[[Run, Any, Any], Any]) -> Any:
    return lambda run, args, kwargs: outer(lambda *given: inner(run, *given), args, kwargs)


def _unit(core: str, units: Sequence[str]) -> str:
    """The block that holds a core; the core itself outside of blocks."""
    return next((unit for unit in units if core == unit or core.startswith(f"{unit}.")), core)


def _replaced(args: Any, kwargs: Any, change: Callable[[Tensor], Any], what: str) -> tuple[Any, Any]:
    """The arguments of a call with the hidden state, the first floating tensor among them, changed."""
    for position, value in enumerate(args):
        if _is_hidden(value):
            return (*args[:position], change(value), *args[position + 1 :]), kwargs
    for name, value in kwargs.items():
        if _is_hidden(value):
            return args, {**kwargs, name: change(value)}
    raise PartitionError(
        f"{what} is called without a hidden state [batch, rows, width]", "pass the hidden state as a separate argument"
    )


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3


def _first(result: Any, path: str) -> tuple[Tensor, tuple[Any, ...]]:
    """The hidden state that a core returns first, and what else it returns."""
    if not isinstance(result, (tuple, list)) or not result or not isinstance(result[0], Tensor):
        raise PartitionError(
            f"the core `{path}` returns a {type(result).__name__}", "return a tensor, or a tuple that begins with one"
        )
    return result[0], tuple(result[1:])


def _check_end(core: Core, result: Tensor, last: Any) -> None:
    """Refuse a core that computes something behind its last product, whose result is a part of a sum."""
    if not isinstance(last, Tensor) or (last is not result and last.grad_fn is not result.grad_fn):
        raise PartitionError(
            f"the core `{core.path}` does not close: `{core.out.path}` does not give its first result",
            "end it with the product in columns, and compute what follows in the block around it",
        )
