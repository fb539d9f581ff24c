"""Recognizes a form of graph at each microbatch, by straight code for that form once it has come often.

A loop over all edges compares numbers and keeps lists. Straight code does neither, and takes half as long: one line per
node names its inputs, and one says which of them are nodes that were named before.

    (n3, o0), (c1, o1), = n2.next_functions
    if o0 or c1 is not n1 or o1: return None
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from schedc_runtime.stage.graph import GraphForm, Node, is_parameter, recognized
from schedc_runtime.written_code import function_of

OFTEN = 8
"""Recognitions after which a form gets code of its own. It takes as long to write as about a hundred recognitions."""


class Recognition:
    """Finds the nodes of one form of graph."""

    def __init__(self, form: GraphForm) -> None:
        self.form = form
        self._times = 0
        self._code: Callable[[Sequence[Node]], list[Node] | None] | None = None

    def nodes(self, roots: Sequence[Node]) -> list[Node] | None:
        """The nodes behind ``roots`` by number if they have this form over the same parameters; None if not."""
        if self._code is not None:
            return self._code(roots)
        nodes = recognized(self.form, roots)
        if nodes is not None:
            self._times += 1
            if self._times == OFTEN:
                self._code = straight_code(self.form)
        return nodes


def straight_code(form: GraphForm) -> Callable[[Sequence[Node]], list[Node] | None]:
    """A function like `recognized` for one form."""
    text = "\n".join(_lines(form))
    walk: Callable[..., list[Node]] = function_of("walk", text, "<walk of a graph>", {}, shown=False)
    count, kinds, parameters, inputs = len(form.kinds), form.kinds, tuple(form.parameters.items()), form.inputs

    def nodes_of(roots: Sequence[Node]) -> list[Node] | None:
        try:
            nodes = walk(roots)
        except (AttributeError, TypeError, ValueError):  # no node behind an edge, or another number of edges
            return None
        if nodes is None or tuple(map(type, nodes)) != kinds or len(set(nodes)) != count:
            return None
        for index, leaf in parameters:
            if nodes[index] is not leaf:
                return None
        return None if any(is_parameter(nodes[index]) for index in inputs) else nodes

    return nodes_of


def _lines(form: GraphForm) -> Iterator[str]:
    """The function ``walk``, line by line: the nodes by number, or None if an edge leads elsewhere."""
    yield "def walk(roots):"
    yield f"    {''.join(f'n{number}, ' for number in range(form.roots))} = roots"
    count = form.roots
    for number, edges in enumerate(form.edges):
        if not edges:  # a leaf, by its class
            continue
        targets, differences = [], []
        for slot, (child, output) in enumerate(edges):
            if child == count:
                count += 1
                targets.append(f"(n{child}, o{slot})")
            else:
                targets.append(f"(c{slot}, o{slot})")
                differences.append(f"c{slot} is not {f'n{child}' if child >= 0 else None}")
            differences.append(f"o{slot} != {output}" if output else f"o{slot}")
        yield f"    {', '.join(targets)}, = n{number}.next_functions"
        yield f"    if {' or '.join(differences)}: return None"
    yield f"    return [{', '.join(f'n{number}' for number in range(count))}]"
