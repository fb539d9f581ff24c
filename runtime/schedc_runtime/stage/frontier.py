"""Decides where a backward is split: which gradients of parameters wait for W, from the form of autograd's graph.

    x ----------------> [product] -> ...        I runs the product's other input, and stops here:
    weight -> chain ----^                       W computes the gradient of this slot, then runs the chain.

A slot of a product is put off if everything behind it comes from parameters and passes no other product. What lies
behind it is its chain: transposes, casts of autocast, chunks of a packed weight, parametrizations. W runs the chain by
the engine; I does not, so that the chain keeps what it has saved.

A parameter that I needs elsewhere keeps all its uses in I: autograd sums the uses of a microbatch before it adds them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.autograd.function import BackwardCFunction

from schedc_runtime.stage.additions import Leaf, leaf_of
from schedc_runtime.stage.graph import GraphForm, Node
from schedc_runtime.stage.recipes import Recipe, Slots, recipe_of
from schedc_runtime.stage.recognition import Recognition
from schedc_runtime.stage.saved_tensors import SavedName, hooked, saved_name

PLAIN = frozenset(
    ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0", "ToCopyBackward0")
)
"""Nodes through which a factor of a weight may pass: they select nothing by data."""


class Way(NamedTuple):
    """Where the gradient of a slot goes on.

    number, output: the edge behind the slot. leaf: the parameter behind it, if nothing but a transpose lies between,
    and the recipe can do without it.
    """

    slot: int
    number: int
    output: int
    leaf: Leaf | None


@dataclass(frozen=True, eq=False)
class Product:
    """A node whose gradients of ``slots`` are put off.

    number: the node's number. ways: [slots] where each gradient goes on. saved: names of the tensors that it needs.
    ends: whether I has nothing to run behind the node. in_python: whether it is a function written in Python.
    leaves: [slots] the parameters of the ways; empty unless every way has one. turned: slots whose gradients then go on
    transposed. passed: numbers of the nodes between.
    """

    number: int
    recipe: Recipe
    slots: Slots
    ways: tuple[Way, ...]
    saved: tuple[SavedName, ...]
    ends: bool
    in_python: bool
    leaves: tuple[Leaf, ...] = ()
    turned: Slots = ()
    passed: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Frontier:
    """Where the backward of one form of graph is split.

    recognition: finds the nodes of the form at the next microbatch.
    together: products whose gradients meet in a parameter. W runs their chains in one call of the engine.
    inputs, in_i: numbers of the leaves whose gradients I computes: inputs of the stage, and parameters.
    leaves: [in_i] those parameters.
    """

    recognition: Recognition
    together: tuple[tuple[Product, ...], ...]
    inputs: tuple[int, ...]
    in_i: tuple[int, ...]
    leaves: tuple[Leaf, ...]


def frontier(form: GraphForm, nodes: Sequence[Node]) -> Frontier:
    """Where the backward is split. nodes: those of one microbatch, by number."""
    search = _SlotSearch(form, nodes)
    slots = search.slots()
    products = [search.product(number, chosen) for number, chosen in sorted(slots.items())]
    groups = [tuple(group) for group in _meeting(products, search)]
    together = [(search.shortened(group[0]),) if len(group) == 1 else group for group in groups]
    needed = sorted(search.leaves_in_i({(number, slot) for number, chosen in slots.items() for slot in chosen}))
    inputs, parameters = (tuple(n for n in needed if (n in form.parameters) is kind) for kind in (False, True))
    return Frontier(
        Recognition(form), tuple(together), inputs, parameters, tuple(leaf_of(nodes[n]) for n in parameters)
    )


class _SlotSearch:
    """What the search for slots asks of a graph again and again."""

    def __init__(self, form: GraphForm, nodes: Sequence[Node]) -> None:
        self.form, self.nodes = form, nodes
        self.names = [node.name() for node in nodes]
        self.recipes = {
            number: recipe
            for number, name in enumerate(self.names)
            if (recipe := recipe_of(nodes[number], name)) is not None and _is_plain(nodes[number])
        }
        self._from_parameters: dict[int, bool] = {}

    def slots(self) -> dict[int, Slots]:
        """The slots that are put off, by product."""
        candidates = {
            (number, slot): self.leaves(child)
            for number, recipe in self.recipes.items()
            for slot, (child, _) in enumerate(self.form.edges[number])
            if slot in recipe.saved and child >= 0 and self.from_parameters(child)
        }
        while True:
            needed = self.leaves_in_i(set(candidates))
            kept = {key: leaves for key, leaves in candidates.items() if not leaves & needed}
            kept = {key: leaves for key, leaves in kept.items() if self._complete(*key, kept.keys())}
            if len(kept) == len(candidates):
                break
            candidates = kept
        reached = set(self._behind(range(self.form.roots), set(candidates)))  # what W runs makes no work of its own
        chosen: dict[int, Slots] = {}
        for number, slot in sorted(candidates):
            if number in reached:
                chosen[number] = (*chosen.get(number, ()), slot)
        return chosen

    def _complete(self, number: int, slot: int, kept: Container[tuple[int, int]]) -> bool:
        """Whether the slots that must wait with this one do so."""
        recipe, edges = self.recipes[number], self.form.edges[number]
        if slot in recipe.with_weight:
            return any((number, weight) in kept for weight in recipe.saved if weight not in recipe.with_weight)
        if recipe.leaves:
            return all((number, each) in kept for each in recipe.saved)
        if not recipe.joint:
            return True
        return all((number, bias) in kept for bias in recipe.with_weight if edges[bias][0] >= 0)

    def product(self, number: int, slots: Slots) -> Product:
        recipe, edges = self.recipes[number], self.form.edges[number]
        saved = dict.fromkeys(name for slot in slots for name in recipe.saved[slot])
        ends = all(child < 0 or slot in slots for slot, (child, _) in enumerate(edges))
        in_python = isinstance(self.nodes[number], BackwardCFunction)
        ways = tuple(Way(slot, *edges[slot], None) for slot in slots)
        return Product(number, recipe, slots, ways, tuple(map(saved_name, saved)), ends, in_python)

    def shortened(self, product: Product) -> Product:
        """The product with ways that end at their parameters, where no other way of it does.

        They leave out a transpose in front of a weight. A bias that is a parameter has no other way.
        """
        numbers = [self._parameter_behind(way, product.recipe) for way in product.ways]
        ways = tuple(
            way._replace(leaf=leaf_of(self.nodes[leaf])) if leaf >= 0 and numbers.count(leaf) == 1 else way
            for way, leaf in zip(product.ways, numbers, strict=True)
        )
        leaves = tuple(way.leaf for way in ways if way.leaf is not None)
        if len(leaves) < len(ways):
            return replace(product, ways=ways)
        turned = tuple(way.slot for way in ways if way.slot in product.recipe.turns)
        return replace(product, ways=ways, leaves=leaves, turned=turned, passed=tuple(way.number for way in ways))

    def _parameter_behind(self, way: Way, recipe: Recipe) -> int:
        """The number of the parameter that a bias is, or whose transpose a factor is; -1 for any other way."""
        number = way.number
        if way.slot in recipe.turns:
            number = self.form.edges[number][0][0] if self.names[number] == "TBackward0" else -1
        elif way.slot not in recipe.with_weight:
            return -1
        return number if number in self.form.parameters else -1

    def leaves(self, number: int) -> frozenset[int]:
        """The leaves behind a node, itself included."""
        return frozenset(node for node in self._behind([number], set()) if self._leaf(node))

    def leaves_in_i(self, put_off: set[tuple[int, int]]) -> set[int]:
        """The leaves that are reached without passing a slot that is put off."""
        return {node for node in self._behind(range(self.form.roots), put_off) if self._leaf(node)}

    def _behind(self, numbers: Sequence[int], put_off: set[tuple[int, int]]) -> Iterator[int]:
        reached = set(numbers)
        stack = list(numbers)
        while stack:
            number = stack.pop()
            yield number
            for slot, (child, _) in enumerate(self.form.edges[number]):
                if child >= 0 and child not in reached and (number, slot) not in put_off:
                    reached.add(child)
                    stack.append(child)

    def _leaf(self, number: int) -> bool:
        return number in self.form.parameters or number in self.form.inputs

    def from_parameters(self, number: int) -> bool:
        """Whether a node is a parameter or a chain behind which there are parameters alone."""
        stack = [number]
        while stack:
            node = stack[-1]
            children = [child for child, _ in self.form.edges[node] if child >= 0]
            waiting = [child for child in children if child not in self._from_parameters]
            if node in self._from_parameters or not waiting:
                self._from_parameters.setdefault(node, self._chain(node, children))
                stack.pop()
            else:
                stack += waiting
        return self._from_parameters[number]

    def _chain(self, number: int, children: Sequence[int]) -> bool:
        if not children:
            return number in self.form.parameters
        if number in self.recipes and not self._makes_weight(number):
            return False
        return all(self._from_parameters[child] for child in children) and not hooked(self.nodes[number])

    def _makes_weight(self, number: int) -> bool:
        """Whether a product is itself a weight, such as that of two narrow matrices: no factor comes from data."""
        factors, edges = self.recipes[number].factors, self.form.edges[number]
        return bool(factors) and all(self._plain_factor(edges[slot][0]) for slot in factors)

    def _plain_factor(self, number: int) -> bool:
        while number >= 0 and number not in self.form.parameters:
            if self.names[number] not in PLAIN:
                return False
            number = self.form.edges[number][0][0]
        return number >= 0


def _is_plain(node: Node) -> bool:
    """Whether the recipes hold for a node: real numbers, and no nested tensors."""
    metadata = node._input_metadata[0]
    return not (metadata.dtype.is_complex or metadata.is_nested_tensor)


def _meeting(products: Sequence[Product], search: _SlotSearch) -> list[list[Product]]:
    """The products in groups that share no parameter."""
    group_of: dict[int, list[Product]] = {}
    for product in products:
        leaves = {leaf for _, child, *_ in product.ways for leaf in search.leaves(child)}
        met = {id(group): group for leaf in leaves if (group := group_of.get(leaf)) is not None}
        merged = [*(member for group in met.values() for member in group), product]
        for leaf in {leaf for member in merged for _, child, *_ in member.ways for leaf in search.leaves(child)}:
            group_of[leaf] = merged
    return list({id(group): group for group in group_of.values()}.values())
