"""Weight gradients as work items: computed at once in B, or queued in I and computed in W, with the same bits.

The gradient of a linear or embedding weight needs only what went in and the gradient of what came out; nothing
waits for it. So these layers get a forward of their own (on the instance; `uninstall` takes it away again) whose
backward returns no weight gradient but hands a `WeightWork` to the stage's `WeightSink`:

    B: the sink runs it at once            W: queued by I, run later, in the order I queued it

Both run the same functions in the same order per parameter, therefore I + W and B give the same bits. After I the graph
is gone and only (input, output gradient) of each layer are held. A linear layer's bias belongs to the item of its
weight: its gradient is a sum over the output gradient.

Every other layer stays with autograd, and so do these layers where deferring is not known to be right
(`left_to_autograd`): their gradients are computed in I. Those of vectors, such as a norm's scale and shift, are still
added in W (`GradientWork`), so that all of these are summed in the order of W. Matrices are added in I: a gradient kept
until W would be as large as its parameter.

Zero Bubble Pipeline Parallelism (Qi et al., 2023), section 2, for the split of backward into I and W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from schedc_runtime.errors import StageError


class WeightWork(NamedTuple):
    """One weight gradient yet to be computed: ``parameter.grad += compute(inputs, grad)``.

    bias: of the same layer; its gradient is the sum of ``grad`` [rows, out] over the rows.
    """

    parameter: nn.Parameter
    compute: Callable[[Tensor, Tensor, nn.Parameter, Any], Tensor]
    inputs: Tensor
    grad: Tensor
    options: Any = None
    bias: nn.Parameter | None = None

    def run(self) -> None:
        """Compute the gradients and add them to the parameters'."""
        accumulate(self.parameter, self.compute(self.inputs, self.grad, self.parameter, self.options))
        if self.bias is not None:
            accumulate(self.bias, self.grad.sum(0))


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """``parameter.grad += grad``; a parameter without a gradient takes ``grad`` itself."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


class GradientWork(NamedTuple):
    """A gradient that I has computed and W adds: ``parameter.grad += grad``."""

    parameter: nn.Parameter
    grad: Tensor

    def run(self) -> None:
        accumulate(self.parameter, self.grad)


class WeightSink:
    """Where the layers of one stage put their weight work. One per stage object, never shared."""

    def __init__(self) -> None:
        self.queue: deque[WeightWork | GradientWork] | None = None
        """What collects work while a backward defers it; None: work runs at once."""
        self.pending: dict[int, deque[WeightWork | GradientWork]] = {}
        """Deferred work by microbatch."""

    @contextmanager
    def deferring(self, microbatch: int, late: Sequence[nn.Parameter] = ()) -> Iterator[None]:
        """Around a backward whose work is kept, as that of ``microbatch``.

        late: parameters, each once, whose gradients from autograd are kept as well. Autograd finds none to add to, so
        that this takes no copy.
        """
        queue = self.queue = self.pending[microbatch] = deque()
        before = [parameter.grad for parameter in late]
        for parameter in late:
            parameter.grad = None
        try:
            yield
        finally:
            self.queue = None
            for parameter, grad in zip(late, before, strict=True):
                computed, parameter.grad = parameter.grad, grad
                if computed is not None:
                    queue.append(GradientWork(parameter, computed))

    def put(self, work: WeightWork) -> None:
        """Run or keep ``work``, as the backward in progress has it."""
        if self.queue is None:
            work.run()
        else:
            self.queue.append(work)

    def flush(self, microbatch: int) -> None:
        """W: run what was deferred for ``microbatch``, letting go of each item as it is done."""
        work = self.pending.pop(microbatch)
        with torch.no_grad():
            while work:
                work.popleft().run()


def install(module: nn.Module, sink: WeightSink) -> None:
    """Give every linear and embedding layer inside ``module`` a forward that hands its weight work to ``sink``."""
    for name, layer in module.named_modules():
        if isinstance(layer.__dict__.get("forward"), Deferring):
            raise StageError(
                f"layer `{name}` already belongs to another stage object",
                "build every stage from its own copy of the model (copy.deepcopy), or release() the old stage first",
            )
        if (forward := FORWARDS.get(type(layer))) and "forward" not in layer.__dict__:
            layer.__dict__["forward"] = forward(layer, sink)


def uninstall(module: nn.Module) -> None:
    """Undo `install`: every layer has the forward of its class again."""
    for layer in module.modules():
        if isinstance(layer.__dict__.get("forward"), Deferring):
            del layer.__dict__["forward"]


class Deferring:
    """A layer's replaced forward. An object, not a closure, so that a deep copy of the layer copies it along."""

    def __init__(self, layer: Any, sink: WeightSink) -> None:
        self.layer, self.sink = layer, sink


class _LinearForward(Deferring):
    def __call__(self, input: Tensor) -> Tensor:
        layer = self.layer
        weight = layer.weight
        if left_to_autograd(weight, input):
            return functional.linear(input, weight, layer.bias)
        bias = layer.bias
        late = None if bias is None or left_to_autograd(bias, input) else bias
        output: Tensor = _Linear.apply(input, weight, bias, late, self.sink)  # type: ignore[no-untyped-call]
        return output


class _EmbeddingForward(Deferring):
    def __call__(self, input: Tensor) -> Tensor:
        layer = self.layer
        weight = layer.weight
        if left_to_autograd(weight, weight) or layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
            return functional.embedding(
                input,
                weight,
                layer.padding_idx,
                layer.max_norm,
                layer.norm_type,
                layer.scale_grad_by_freq,
                layer.sparse,
            )
        output: Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
            input, weight, layer.padding_idx, self.sink
        )
        return output


FORWARDS: dict[type, type[Deferring]] = {nn.Linear: _LinearForward, nn.Embedding: _EmbeddingForward}
"""By exact class: a subclass may compute something else. Modules that define such a layer add theirs."""


def left_to_autograd(weight: Tensor, input: Tensor) -> bool:
    """Whether the weight's gradient is left to autograd: frozen, not a plain parameter, hooked, or cast on the way."""
    return (
        not weight.requires_grad
        or not torch.is_grad_enabled()
        or type(weight) is not nn.Parameter
        or _hooked(weight)
        or torch.is_autocast_enabled(input.device.type)
    )


def _hooked(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


class Vectors:
    """The parameters of one dimension inside ``module``, looked up anew each time: sharding exchanges them."""

    def __init__(self, module: nn.Module) -> None:
        first = {
            id(parameter): (layer._parameters, name)
            for layer in module.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and parameter.dim() <= 1
        }
        self._places = tuple(first.values())

    def late(self) -> list[nn.Parameter]:
        """Those whose gradients W adds: trainable ones without hooks, which would have to fire on the sum."""
        return unhooked(parameters[name] for parameters, name in self._places)


def unhooked(parameters: Iterable[nn.Parameter | None]) -> list[nn.Parameter]:
    """Those that are trained and have no hook."""
    return [p for p in parameters if p is not None and p.requires_grad and not _hooked(p)]


class _Linear(torch.autograd.Function):
    """``functional.linear`` whose weight gradient, and that of ``late``, its bias, goes to a sink.

    late: the bias, or None where its gradient is left to autograd. The weight is an input, so that the output needs a
    gradient even when nothing before it does (a first stage, or one behind frozen stages); its gradient is returned as
    None.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: nn.Parameter, bias: Tensor | None, late: nn.Parameter | None, sink: WeightSink
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.weight, ctx.late, ctx.sink = weight, late, sink
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        refuse_twice(ctx)
        input, weight = ctx.saved_tensors
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        input_grad = flat.mm(weight).view(input.shape) if needs_input else None
        bias_grad = flat.sum(0) if needs_bias and ctx.late is None else None
        # Detached: the input knows what made it, and would keep that graph until W.
        ctx.sink.put(WeightWork(ctx.weight, _linear_grad, input.detach(), flat, bias=ctx.late))
        return input_grad, None, bias_grad, None, None


def refuse_twice(ctx: Any) -> None:
    """Refuse double backward, like torch's `once_differentiable`, whose wrapper costs more than all else here."""
    if torch.is_grad_enabled():
        raise StageError(
            f"{type(ctx).__name__.strip('_')}: the gradient of a gradient is asked for (create_graph=True)",
            "deferred weight gradients are not differentiable; freeze the layer's weight or subclass the layer",
        )


def _linear_grad(input: Tensor, grad: Tensor, weight: nn.Parameter, _: None) -> Tensor:
    """[out, in] as autograd computes it: the same product in the same order, hence the same bits."""
    return grad.t().mm(input.reshape(-1, input.shape[-1]))


class _Embedding(torch.autograd.Function):
    """``functional.embedding`` whose weight gradient goes to a sink."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: nn.Parameter, padding: int | None, sink: WeightSink) -> Tensor:
        ctx.save_for_backward(index)
        ctx.weight, ctx.padding, ctx.sink = weight, -1 if padding is None else padding, sink
        return functional.embedding(index, weight, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        refuse_twice(ctx)
        (index,) = ctx.saved_tensors
        ctx.sink.put(WeightWork(ctx.weight, _embedding_grad, index, grad, ctx.padding))
        return None, None, None, None


def _embedding_grad(index: Tensor, grad: Tensor, weight: nn.Parameter, padding: int) -> Tensor:
    """[rows, width], dense: the rows of ``grad`` summed by index, but for the padding row."""
    return torch.ops.aten.embedding_dense_backward(grad, index, weight.shape[0], padding, False)  # type: ignore[no-any-return]
