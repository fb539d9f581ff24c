"""The backends of torch.compile whose backward graphs are cut for I and W: inductor and AOTAutograd without a compiler.

Both are torch's own, with their passes, partitioner and decompositions. The cut takes place where the backward graph is
handed to the compiler, which then compiles two graphs instead of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch._functorch.config as functorch_config
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager, boxed_nop
from torch._guards import TracingContext

from schedc_runtime.compiled.backward_cut import CutGraphs, cut_backward
from schedc_runtime.compiled.split_call import CutBackward, marked

Compiler = Callable[..., Any]
"""(graph, example inputs, ...) -> the graph's function, which takes a list of arguments."""


def cut_aot_eager(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """torch's ``aot_eager`` with a cut backward."""
    with _ahead():
        return aot_eager(module, list(inputs), bw_compiler=_cutting(boxed_nop, inputs))


def cut_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], *, patches: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """torch's ``inductor`` with a cut backward. patches: settings of inductor."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: fx.GraphModule, example: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            return compile_fx_inner(graph, example, **options)
        return _cutting(compile_fx_inner, inputs)(graph, example, **options)

    with _ahead():
        return compile_fx(module, inputs, inner_compile=inner, config_patches=dict(patches or {}))  # type: ignore[return-value]


def _ahead() -> Any:
    """Compile the backward with the forward, so that the first backward knows what waits; and use no stored backward,
    which would be whole."""
    return functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)


def _cutting(compiler: Compiler, inputs: Sequence[Any]) -> Compiler:
    """A compiler of backward graphs that cuts them. inputs: those of the forward."""
    parameters = {number for number, value in enumerate(inputs) if isinstance(value, nn.Parameter)}

    def compile_backward(module: fx.GraphModule, example: Sequence[Any], **options: Any) -> Any:
        candidates = _gradients_of(module, parameters)
        graphs = cut_backward(module, candidates)
        if graphs is None:
            return marked(compiler(module, example, **options), None)
        _donate_nothing()
        _keep_strides(graphs)
        with TracingContext.report_output_strides() as strides:
            i = compiler(graphs.i, example, **options)
        values = _values_of_w(graphs, example, strides or [])
        with _kept_nowhere() if _changes(values) else nullcontext():
            w = compiler(graphs.w, values, **_for_w(options))
        cut = CutBackward(graphs, i, w, tuple(_slot(inputs, candidates[position]) for position in graphs.waiting))
        return marked(cut, cut)

    return compile_backward


def _gradients_of(module: fx.GraphModule, parameters: set[int]) -> dict[int, int]:
    """By output of a backward graph that is the gradient of a parameter: the parameter's number among the inputs."""
    described = module.graph.output_node().meta.get("desc", ())
    sources = {number: getattr(getattr(what, "grad_of", None), "idx", -1) for number, what in enumerate(described)}
    return {number: source for number, source in sources.items() if source in parameters}


def _slot(inputs: Sequence[Any], number: int) -> int:
    """The place of an input among autograd's edges: those of tensors alone."""
    return sum(isinstance(value, Tensor) for value in inputs[:number])


def _donate_nothing() -> None:
    """Let the compiler write into no saved tensor: W may read it after I."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None and context.fw_metadata.bw_donated_idxs:
        context.fw_metadata.bw_donated_idxs.clear()


def _values_of_w(graphs: CutGraphs, example: Sequence[Any], strides: Sequence[Sequence[int] | None]) -> list[Any]:
    """Examples of what W reads, with the strides that the compiler has chosen for what I computes."""
    computed = graphs.inputs_of_w[len(graphs.positions) :]
    values = [node.meta["val"] for node in computed]
    for number, (value, chosen) in enumerate(zip(values, strides[graphs.outputs :], strict=False)):
        if chosen is not None and all(isinstance(stride, int) for stride in (*chosen, *value.stride())):
            values[number] = value.as_strided(value.size(), tuple(chosen))
    return [*(example[position] for position in graphs.positions), *values]


def _keep_strides(graphs: CutGraphs) -> None:
    """W is compiled for the strides that its inputs have in the graph; I must keep them."""
    for module in (graphs.i, graphs.w):
        output = module.graph.output_node()
        results: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = [n for n, node in enumerate(results) if node is not None]


def _changes(values: Sequence[Any]) -> bool:
    """Whether a tensor among the values has a size that changes."""
    return any(
        not isinstance(size, int)
        for value in values
        if isinstance(value, Tensor)
        for size in (*value.size(), *value.stride())
    )


def _kept_nowhere() -> Any:
    """Neither look a graph up in inductor's cache on disk nor put it there.

    The cache tells changing sizes by numbers among a graph's inputs. W has none: it takes sizes from its tensors.
    """
    import torch._inductor.config as inductor_config

    return inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)


def _for_w(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a backward graph for W's: no input of W has a fixed address."""
    return {**options, **({"static_input_idxs": ()} if "static_input_idxs" in options else {})}
