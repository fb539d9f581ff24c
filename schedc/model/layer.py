"""What a layer holds, computes and recomputes, per token and by level: sums over its parts.

The arrived rows are not held beside their copies in the order of the experts. A level that recomputes the copies, but
does not dispatch a second time, holds the arrived rows instead. Not counted are the logarithms of attention's sums,
indexes, masks of dropout, and what kernels and collectives take inside. FLOPs are those of products, two for a product
of two numbers. Scores are causal over the sequence, and not counted where the sequence is not known.

Working memory is what a running layer takes beyond the memory for its backward. Parts run in turn, so that
the largest counts:

    tokens      gradients or values on their way between its parts: 4 H
    attention   gradients of query, key, value and result
    dense MLP   gradients between its products, and two temporaries of the activation; shared experts alike
    rows        those of `Layer.passing`
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from schedc.model.counts import part_bytes, part_flops, part_parameters, product_flops
from schedc.model.fusions import unfused_numbers
from schedc.model.levels import EXPERT_FLOPS, Level, bytes_per_number, first_product
from schedc.model.parts import LayerPart, PartName, parts_of
from schedc.model.sizes import LayerKind, ModelSizes, MoeSizes

_BESIDE = 36
"""Bytes per row that no level saves: at most four indexes for its way, and its gate."""
_ON_THEIR_WAY = 4
"""Rows of H columns between the parts of a layer: input and output of the layer, and of the running part."""
_OF_HEADS = ("query", "key", "value", "attention result")
"""Tensors whose gradients attention computes at once."""


class Saving(NamedTuple):
    """Bytes that a level does not hold and FLOPs that it recomputes, per token and layer."""

    bytes: float
    flops: int


class RowsPerToken(NamedTuple):
    """Rows of a rank per token of its own. experts: rows that its experts compute. arrive: rows of the last hop."""

    experts: float
    arrive: float


@dataclass(frozen=True)
class Layer:
    """A kind of layer.

    dtype: type of activations. said: bytes per token that attention holds, norms apart; 0: those of its tensors.
    fused: chains of operations that run fused; None: as in this package's blocks. buffer_factor: rows of buffers
    over those of balanced ranks. arriving: rows that a rank gets per token of its own; None: each row travels alone.
    expert_buffers: buffers of experts' rows, of which one is computed.
    """

    sizes: ModelSizes
    kind: LayerKind
    dtype: str = ""
    said: float = 0.0
    fused: tuple[str, ...] | None = None
    buffer_factor: float = 1.0
    arriving: float | None = None
    expert_buffers: int = 1

    @cached_property
    def _number(self) -> int:
        return bytes_per_number(self.dtype)

    @property
    def _moe(self) -> MoeSizes:
        assert self.sizes.moe is not None, "a layer with experts"
        return self.sizes.moe

    @property
    def _is_moe(self) -> bool:
        return self.kind is LayerKind.MOE and self.sizes.moe is not None

    def part(self, name: PartName) -> LayerPart:
        """A part of the layer; one with nothing where it has no such part."""
        return self._parts.get(name, _NOTHING)

    @cached_property
    def _parts(self) -> dict[PartName, LayerPart]:
        return dict(parts_of(self.sizes, self.kind))

    @property
    def rows(self) -> RowsPerToken:
        """Rows that come where ranks are balanced; none in a dense layer."""
        if not self._is_moe:
            return RowsPerToken(0.0, 0.0)
        top = self._moe.top
        arriving = top if self.arriving is None else self.arriving
        return RowsPerToken(top * self.buffer_factor * self.expert_buffers, arriving * self.buffer_factor)

    def attention_bytes(self, level: Level = Level.NONE) -> float:
        """Bytes per token that attention holds at a level, norms apart."""
        held = float(part_bytes(self.part(PartName.ATTENTION), level, self.dtype))
        return held if not self.said else min(held, self.said) if level >= Level.LAYER else self.said

    def held(self, level: Level = Level.NONE, of_rows: Level | None = None, rows: RowsPerToken | None = None) -> float:
        """Bytes per token that the layer holds. of_rows: level of the routed experts. rows: by default `rows`."""
        rows = rows or self.rows
        norms, shared, dense, scores = (
            part_bytes(self.part(name), level, self.dtype)
            for name in (PartName.NORMS, PartName.SHARED, PartName.DENSE, PartName.ROUTER)
        )
        experts = self.part(PartName.EXPERTS)
        computed, arrived = (part_bytes(experts, of_rows or level, self.dtype, per) for per in ("row", "arrived"))
        of_rows_held = norms + shared + dense + rows.experts * computed + rows.arrive * arrived
        unfused = 0 if self._is_moe else unfused_numbers(self.fused, self.sizes, level) * self._number
        return self.attention_bytes(level) + of_rows_held + (scores + unfused)

    def held_by_role(self, level: Level = Level.NONE) -> dict[str, float]:
        """Bytes per token that a MoE layer holds, by role of its segments, with balanced rows that travel alone.

        Attention has its own norms, those of the experts, and the router. Experts have the rows as received.
        """
        whole = self.held(level, rows=RowsPerToken(self.rows.experts, self.rows.experts))
        shared = part_bytes(self.part(PartName.SHARED), level, self.dtype)
        others = whole - self.held(level, rows=RowsPerToken(0, 0))
        return {"attention": whole - others - shared, "shared": shared, "experts": others}

    def gathered(self, ranks: int, contexts: int, level: Level = Level.NONE) -> float:
        """Bytes per token that a layer holds more on so many tensor and context ranks.

        A core keeps the rows of all tensor ranks for its weight gradients, and not the own ones behind the norm. An
        attention keeps keys and values of all context ranks. Source: Korthikanti et al., 2022, section 4.2.2. The level
        `layer` gathers again. It holds the own rows before each core, and not before the layer alone.
        """
        if level >= Level.LAYER:
            saved = self.part(PartName.ATTENTION).saved if ranks * contexts > 1 else ()
            return self._number * sum(x.columns for x in saved if x.name == "input of MLP")
        keys = float((contexts - 1) * self.key_bytes)
        if ranks == 1:
            return keys
        cores = ("normed input", "normed input of MLP")[: 1 if self._is_moe else 2]
        own = sum(x.columns for x in self.part(PartName.NORMS).saved if x.name in cores and x.saved_at(level))
        return keys + self._number * (ranks * len(cores) * self.sizes.hidden - own)

    @property
    def key_bytes(self) -> int:
        """Bytes per token of its keys and values, which context ranks exchange."""
        saved = self.part(PartName.ATTENTION).saved
        return self._number * sum(x.columns for x in saved if x.name in ("key", "value"))

    def adaptive(self, threshold: float, most: RowsPerToken, alone: Level | None = None) -> float:
        """Bytes per token that a MoE layer holds where it recomputes above a threshold, with ``most`` rows at worst.

        threshold: largest held number of rows, over the mean. alone: the level that a rank, deciding alone, has
        above the threshold; None for a group, which then holds no rows.
        """
        up_to = RowsPerToken(min(threshold * self._moe.top, most.experts), most.arrive)
        held = self.held(rows=up_to)
        if alone is not None:
            held = max(held, self.held(Level.NONE, alone, most))
        return held + _BESIDE * most.experts

    def whole(self, most: RowsPerToken) -> float:
        """Bytes per token of a MoE layer with ``most`` rows that holds everything: in a backward, or after an R."""
        arrived = self._number * self.sizes.hidden * most.arrive
        return self.held(Level.NONE, Level.NONE, most) + arrived + _BESIDE * most.experts

    def of_rows(self, rows: float) -> float:
        """Bytes per token of ``rows`` rows of a token's columns: as they arrive, or gradients of experts' outputs."""
        return self._number * self.sizes.hidden * rows

    def passing(self, most: RowsPerToken) -> float:
        """Bytes per token of the temporaries while ``most`` rows run through a layer, forward or backward.

        They add to `whole`: gradients of the arrived rows, and three of the rows (outputs with and without gates,
        gradients of inputs). There are also gradients of both products and the activation, and two temporaries of the
        latter.
        """
        H, F = self.sizes.hidden, self._moe.width
        return self._number * (most.arrive * H + most.experts * (3 * H + 5 * F))

    @property
    def working(self) -> float:
        """Bytes per token that the layer takes while it runs."""
        if self._is_moe:
            rows, moe = self.rows.experts, self._moe
            largest = max(self.passing(RowsPerToken(rows, rows)), 5 * moe.shared * moe.width * self._number)
        else:
            largest = (4 + self.sizes.gated) * self.sizes.ffn * self._number
        heads = sum(x.columns for x in self.part(PartName.ATTENTION).saved if x.name in _OF_HEADS)
        return _ON_THEIR_WAY * self.sizes.hidden * self._number + max(largest, heads * self._number)

    @cached_property
    def _attention_flops(self) -> float:
        """The mean over the layers of this kind, some of which may look back less far."""
        sizes, attention = self.sizes, self.part(PartName.ATTENTION)
        windows = Counter(sizes.window_of(layer) for layer in range(sizes.layers) if sizes.kind_of(layer) is self.kind)
        windows = windows or Counter([0])
        flops = ((part_flops(attention._replace(window=w), sizes.seq), count) for w, count in windows.items())
        return sum(each * count for each, count in flops) / windows.total()

    @property
    def flops(self) -> float:
        """FLOPs of a forward, per token. Layers of the kind have windows of their own: the mean."""
        own = product_flops(self.part(PartName.ROUTER)) + product_flops(self.part(PartName.DENSE))
        if not self._is_moe:
            return self._attention_flops + own
        rows = self.rows.experts / self.expert_buffers + self._moe.shared
        return self._attention_flops + own + EXPERT_FLOPS * rows * self.sizes.hidden * self._moe.width

    def saving(self, level: Level) -> Saving:
        """The saved bytes and the recomputed FLOPs of a level."""
        flops: float = product_flops(self.part(PartName.ROUTER)) * (level >= Level.LIGHT)
        flops += product_flops(self.part(PartName.DENSE)) * (level >= Level.FULL)
        if self._is_moe:
            moe, first = self._moe, first_product(level)
            products = first * moe.top * self.buffer_factor + first * moe.shared
            flops += products * self.sizes.hidden * moe.width
        flops += self._attention_flops * (level >= Level.LAYER)
        return Saving(self.held() - self.held(level), round(flops))

    @property
    def parameters_of_an_expert(self) -> int:
        """Parameters of the matrices of one expert."""
        return part_parameters(self.part(PartName.EXPERTS)) // self._moe.experts

    @property
    def slot_bytes(self) -> int:
        """Bytes of a copied expert's matrices in its slot."""
        return self.parameters_of_an_expert * self._number

    @property
    def slot_gradient_bytes(self) -> int:
        """Bytes of the gradients of a copied expert's matrices, in float32."""
        return self.parameters_of_an_expert * bytes_per_number("fp32")


_NOTHING = LayerPart()
