"""How rows go through operations that act on each element, along dimensions, or in products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from schedc_runtime.row_flow.flows import OperatorCall, RowPlace, step_of, uniform

Results = Sequence[RowPlace | None]
"""[results] where the rows are in each tensor that an operator gives."""
Rule = Callable[[OperatorCall], Results]

OVER = "goes over the rows"
NUMBERS = "takes another value for each number of a row"
PAIRS = "combines rows with other rows"


def same_flow(call: OperatorCall, layout: RowPlace | None) -> Results:
    """The same layout in all results."""
    return [layout] * len(call.results)


def pointwise(call: OperatorCall) -> Results:
    """An element follows from the elements in its place."""
    return [aligned(call, call.tensors, index) for index in range(len(call.results))]


def aligned(call: OperatorCall, tensors: Sequence[Tensor], result: int = 0) -> RowPlace | None:
    """Where the rows are in a result, whose elements follow from those in their place in ``tensors`` [...]."""
    shape = call.results[result].shape
    ends = [tensor for tensor in tensors if tensor.dim() <= len(shape)]
    mapped = [layout.at(layout.dim + len(shape) - t.dim()) for t in ends if (layout := call.of(t).layout) is not None]
    grown = call.scaled[result]
    base = mapped[0] if mapped else RowPlace(grown[0], 1, shape[grown[0]] // call.rows) if grown else None
    if base is None:
        return None
    if any(layout != base for layout in mapped):
        call.meets(PAIRS)
    call.step = _step(call, ends, base, len(shape))
    return base


def _step(call: OperatorCall, tensors: Sequence[Tensor], base: RowPlace, dims: int) -> int:
    """What the number of a row adds to the result."""
    total = 0
    for position, tensor in enumerate(tensors):
        flow, dim = call.of(tensor), base.dim - dims + tensor.dim()
        step: int | None = flow.step
        if flow.layout is None and dim >= 0 and tensor.shape[dim] != 1:
            own = base.at(dim)
            whole = tensor.shape[dim] == base.outer * base.inner * call.rows
            step = 0 if uniform(tensor, flow, own, call.rows) else None
            if step is None and flow.known is not None and whole:
                step = step_of(flow.known, own, call.rows)
        if step and call.name not in ("add", "sub", "clone", "_to_copy", "detach", "alias", "lift_fresh"):
            step = None
        if step is None:
            call.meets(NUMBERS)
        else:
            total += -step if call.name == "sub" and position else step
    return total


def wanted_dims(call: OperatorCall, name: str, dims: int) -> list[int]:
    """The dimensions named by an argument, all where it names none."""
    given = call.get(name)
    named = [given] if isinstance(given, int) else list(given or ())
    return [dim % dims for dim in named] if named and dims else list(range(dims))


def reduces(call: OperatorCall) -> Results:
    """One value for all elements along dimensions."""
    layout = call.layout("self") or call.layout("input")
    source = call.get("self", call.get("input"))
    if layout is None or not isinstance(source, Tensor):
        return same_flow(call, None)
    dims = wanted_dims(call, "dim", source.dim()) if "dim" in call.given else list(range(source.dim()))
    if layout.dim in dims:
        real = source.dtype.is_floating_point or source.dtype.is_complex
        call.meets(OVER, certain=real)
        return same_flow(call, None)
    kept = call.get("keepdim", False)
    return same_flow(call, layout if kept else layout.at(layout.dim - sum(dim < layout.dim for dim in dims)))


def along(name: str = "dim") -> Rule:
    """All elements along dimensions, which an argument names, follow from one another."""

    def rule(call: OperatorCall) -> Results:
        source = call.get("self", call.get("input"))
        layout = call.of(source).layout
        if layout is not None and layout.dim in wanted_dims(call, name, source.dim()):
            sorts = call.name in ("sort", "argsort", "topk") or not source.dtype.is_floating_point
            call.meets(OVER, certain=not sorts)
        return same_flow(call, layout)

    return rule


def last(count: int, source: str = "self") -> Rule:
    """Acts on the last dimensions of one argument, and on each index of the others by itself."""

    def rule(call: OperatorCall) -> Results:
        return behind(call, source, count)

    return rule


def behind(call: OperatorCall, source: str, count: int) -> Results:
    """The rows of an argument, which must lie before its last ``count`` dimensions."""
    tensor = call.given[source]
    layout = call.of(tensor).layout
    if any(call.of(other).layout is not None for other in call.tensors if other is not tensor):
        call.meets(PAIRS)
    if layout is not None and layout.dim >= tensor.dim() - count:
        call.meets(OVER)
    return [layout if layout is not None and layout.dim < result.dim() else None for result in call.results]


def product(left: str, right: str, out: str, names: tuple[str, str] = ("self", "mat2")) -> Rule:
    """A product of two tensors: a letter per dimension of each, as of einsum; ``bias`` is added to the result."""

    def rule(call: OperatorCall) -> Results:
        found = set()
        for name, letters in zip(names, (left, right), strict=True):
            layout = call.layout(name)
            if layout is None:
                continue
            letter = letters[layout.dim]
            if letter not in out:
                call.meets(OVER)
            else:
                found.add(layout.at(out.index(letter)))
        if len(found) > 1:
            call.meets(PAIRS)
        layout = min(found) if found else None
        _unlike(call, names, (left, right), out, layout)
        bias = call.get("self") if "self" not in names else None
        if isinstance(bias, Tensor) and call.layout("self") is not None:
            added = aligned(call, [bias])
            if layout is not None and added != layout:
                call.meets(PAIRS)
            layout = layout or added
        elif isinstance(bias, Tensor) and layout is not None:
            _step(call, [bias], layout, call.results[0].dim())
        return same_flow(call, layout)

    return rule


def _unlike(
    call: OperatorCall, names: Sequence[str], letters: Sequence[str], out: str, layout: RowPlace | None
) -> None:
    """Note a factor without rows that differs along those of the other one."""
    for name, own in zip(names, letters, strict=True):
        tensor = call.given[name]
        if layout is None or call.layout(name) is not None or out[layout.dim] not in own:
            continue
        if not uniform(tensor, call.of(tensor), layout.at(own.index(out[layout.dim])), call.rows):
            call.meets(NUMBERS)


def attention(call: OperatorCall) -> Results:
    """Attention: [rows, heads, length, width] of queries, keys and values, and a mask that broadcasts to them."""
    tensors = [call.given[name] for name in ("query", "key", "value") if isinstance(call.get(name), Tensor)]
    layouts = {layout for tensor in tensors if (layout := call.of(tensor).layout) is not None}
    if not layouts:
        return same_flow(call, None)
    layout = min(layouts)
    if len(layouts) > 1 or layout.dim > 1:
        call.meets(PAIRS if len(layouts) > 1 else OVER)
    others = {id(tensor) for tensor in tensors}
    for mask in [tensor for tensor in call.tensors if id(tensor) not in others]:
        own = call.of(mask).layout
        if own is not None and own != layout:
            call.meets(PAIRS)
    return [layout if layout.dim < result.dim() and layout.dim < 2 else None for result in call.results]


def batched(call: OperatorCall) -> Results:
    """Acts on each row, dimension 0 of all tensors that have rows."""
    layouts = {call.of(tensor).layout for tensor in call.with_rows}
    if len(layouts) > 1:
        call.meets(PAIRS)
    layout = next(iter(layouts), None)
    if layout is not None and layout.dim != 0:
        call.meets(OVER)
    return same_flow(call, layout)


def convolution(call: OperatorCall) -> Results:
    """A convolution of [rows, channels, ...]."""
    source = call.get("input", call.get("self"))
    layout = call.of(source).layout
    if any(call.of(other).layout is not None for other in call.tensors if other is not source):
        call.meets(PAIRS)
    if layout is not None and layout.dim != 0:
        call.meets(OVER)
    return same_flow(call, layout)


def normalized(call: OperatorCall) -> Results:
    """A norm over the last dimensions."""
    return behind(call, "input", len(call["normalized_shape"]))


def weight_gradient(call: OperatorCall) -> Results:
    """A sum over rows, as the gradient of a parameter is."""
    return same_flow(call, None)


def group_norm(call: OperatorCall) -> Results:
    """A norm over groups of channels of each row."""
    layout = call.layout("input")
    if layout is not None and layout.dim != 0:
        call.meets(OVER)
    return same_flow(call, layout)


def batch_norm(call: OperatorCall) -> Results:
    """A norm of each channel, dimension 1, over all else; with statistics that stay as they are over nothing."""
    layout = call.layout("input") or call.layout("self")
    trains = call.get("training", call.get("train", True)) or call.get("running_mean") is None
    if layout is not None and layout.dim != 1 and trains:
        call.meets("takes statistics of all rows of a microbatch")
    rest = call.results[1:]
    return [layout, *[layout.at(0) if layout and layout.dim == 1 and r.dim() == 1 else None for r in rest]]


def loss(call: OperatorCall) -> Results:
    """A loss of each element, or their mean or sum."""
    if call.get("reduction", 1) != 0:
        if call.with_rows:
            call.meets(OVER)
        return same_flow(call, None)
    return same_flow(call, next((call.of(tensor).layout for tensor in call.with_rows), None))


def embedding_flow(call: OperatorCall) -> Results:
    """Rows of a table by indices."""
    if call.layout("weight") is not None:
        call.meets(PAIRS)
    indices, layout = call["indices"], call.layout("indices")
    if layout is None and call.scaled[0]:
        layout = RowPlace(call.scaled[0][0], 1, call.results[0].shape[call.scaled[0][0]] // call.rows)
        if layout.dim >= indices.dim() or not uniform(indices, call.of(indices), layout, call.rows):
            call.meets(NUMBERS)
    return same_flow(call, layout)


def random(call: OperatorCall) -> Results:
    """Random numbers, each of which is drawn by itself."""
    call.fresh = not call.with_rows
    if call.with_rows:
        return pointwise(call)
    return [RowPlace(g[0], 1, r.shape[g[0]] // call.rows) if g else None
            for g, r in zip(call.scaled, call.results, strict=True)]  # fmt: skip
