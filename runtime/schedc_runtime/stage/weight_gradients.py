"""Weight gradients as work items: computed at once in B, or queued in I and computed in W, with the same bits.

The gradient of a linear or embedding weight needs only the layer's input and the gradient of its output. Nothing waits
for it. These layers therefore get another forward (on the instance, until `uninstall`). Its backward returns no weight
gradient, but hands a `WeightWork` to the stage's `WeightSink`:

    B: the sink runs it at once            W: queued by I, run later, in the order I queued it

Both run the same functions in the same order per parameter. I + W and B therefore give the same bits. After I the
graph is freed; only (input, output gradient) of each layer are held. A linear layer's bias belongs to the item of its
weight: its gradient is a sum over the output gradient.

Autograd computes the gradients of all other layers in I, and those of these layers where deferring is not known to be
right (`left_to_autograd`). Gradients of vectors, such as a norm's scale and shift, are still added in W
(`GradientWork`), so that all of them are summed in the order of W. Gradients of matrices are added in I: held until W,
such a gradient would be as large as its parameter.

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

    bias: the layer's bias; its gradient [out] is the sum of ``grad`` [rows, out] over the rows.
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
    """``parameter.grad += grad``, both [...] of one shape. A parameter without a gradient takes ``grad`` itself."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


class GradientWork(NamedTuple):
    """A gradient, of the parameter's shape, that I has computed and W adds: ``parameter.grad += grad``."""

    parameter: nn.Parameter
    grad: Tensor

    def run(self) -> None:
        accumulate(self.parameter, self.grad)


class WeightSink:
    """Takes the weight work of the layers of one stage. Each stage object has its own."""

    def __init__(self) -> None:
        self.queue: deque[WeightWork | GradientWork] | None = None
        """Collects work while a backward defers it; None: work runs at once."""
        self.pending: dict[int, deque[WeightWork | GradientWork]] = {}
        """Deferred work by microbatch."""

    @contextmanager
    def deferring(self, microbatch: int, late: Sequence[nn.Parameter] = ()) -> Iterator[None]:
        """Wraps a backward whose weight work is deferred, under ``microbatch``.

        late: parameters, each once, whose gradients from autograd are deferred as well. They have no gradient
        meanwhile: autograd has nothing to add to, and this takes no copy.
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
        """Run ``work``, or defer it inside of `deferring`."""
        if self.queue is None:
            work.run()
        else:
            self.queue.append(work)

    def flush(self, microbatch: int) -> None:
        """W: run the deferred work of ``microbatch``, and free each item when it is done."""
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
                "close() the pipeline that was built of this model before, or build from a copy (copy.deepcopy)",
            )
        if (forward := FORWARDS.get(type(layer))) and "forward" not in layer.__dict__:
            layer.__dict__["forward"] = forward(layer, sink)


def uninstall(module: nn.Module) -> None:
    """Undo `install`: every layer has the forward of its class again."""
    for layer in module.modules():
        if isinstance(layer.__dict__.get("forward"), Deferring):
            del layer.__dict__["forward"]


class Deferring:
    """A layer's replaced forward. An object and not a closure: a deep copy of the layer copies it too."""

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
"""The forward by exact class of layer: a subclass may compute something else. Other modules add their layers."""


def left_to_autograd(weight: Tensor, input: Tensor) -> bool:
    """Whether autograd computes the weight's gradient: it is frozen, not a plain parameter, hooked, or cast.

    weight, input: tensors of any shape.
    """
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
    """The parameters of one dimension inside ``module``. Each call looks them up, because sharding replaces them."""

    def __init__(self, module: nn.Module) -> None:
        first = {
            id(parameter): (layer._parameters, name)
            for layer in module.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and parameter.dim() <= 1
        }
        self._places = tuple(first.values())

    def late(self) -> list[nn.Parameter]:
        """The vectors whose gradients W adds: trainable and without hooks. A hook would have to fire on the sum."""
        return unhooked(parameters[name] for parameters, name in self._places)


def unhooked(parameters: Iterable[nn.Parameter | None]) -> list[nn.Parameter]:
    """The parameters that are trained and have no hook."""
    return [p for p in parameters if p is not None and p.requires_grad and not _hooked(p)]


class _Linear(torch.autograd.Function):
    """``functional.linear`` whose gradients of the weight and of ``late`` go to a sink.

    late: the bias, or None if autograd computes its gradient. The weight is an input of the function, with None as its
    gradient. The output therefore requires a gradient even if no layer before does, as in a first stage.
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
        # Detached: the input refers to its graph, and would hold it until W.
        ctx.sink.put(WeightWork(ctx.weight, _linear_grad, input.detach(), flat, bias=ctx.late))
        return input_grad, None, bias_grad, None, None


def refuse_twice(ctx: Any) -> None:
    """Refuse double backward, as torch's `once_differentiable` does; its wrapper costs more than all else here."""
    if torch.is_grad_enabled():
        raise StageError(
            f"{type(ctx).__name__.strip('_')}: the gradient of a gradient is asked for (create_graph=True)",
            "deferred weight gradients are not differentiable; freeze the layer's weight or subclass the layer",
        )


def _linear_grad(input: Tensor, grad: Tensor, weight: nn.Parameter, _: None) -> Tensor:
    """[out, in] The weight gradient. The same product as autograd's, hence the same bits."""
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
    """[rows, width] The dense weight gradient: rows of ``grad`` summed by index, except the padding row."""
    return torch.ops.aten.embedding_dense_backward(grad, index, weight.shape[0], padding, False)  # type: ignore[no-any-return]
