"""Megatron-LM's flags for what a plan attaches to a schedule; what Megatron has no flag for is refused.

Names and rules are those of megatron/training/arguments.py and of `TransformerConfig` in megatron-core, see `RELEASE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from schedc.diagnostics import DiagnosticError
from schedc.interchange.refusals import cannot
from schedc.ir.plan import Level, Method, Plan, Recompute
from schedc.plan.layout.parts import Layout, PartKind
from schedc.source import Source

RELEASE = "0.16.1"
"""The release of megatron-core with these flags."""
_DEEPEP_NODE = 8
"""Ranks of a node in DeepEP, whose rows take two hops."""


@dataclass(frozen=True)
class _ForeignLine:
    """A line of plans that Megatron has no flag for. why: what it does instead."""

    word: str
    is_in: Callable[[Plan], bool]
    why: str


FOREIGN = (
    _ForeignLine("hot", lambda plan: plan.hot is not None, "it copies no expert to other ranks"),
    _ForeignLine("migrate", lambda plan: plan.migrate is not None, "experts stay on their ranks"),
    _ForeignLine("balance", lambda plan: plan.balance is not None, "its experts stay on their ranks in every step"),
    _ForeignLine(
        "slices", lambda plan: max(plan.slices, default=1) > 1, "it exchanges all rows of a microbatch at once"
    ),
    _ForeignLine("cell", lambda plan: bool(plan.cells), "it orders the steps of pairs itself"),
    _ForeignLine("sizes bounded", lambda plan: plan.bound is not None, "buffers follow from the rows that arrive"),
    _ForeignLine("rows fp8", lambda plan: plan.fp8_rows, "rows travel in the type of activations"),
    _ForeignLine(
        "products", lambda plan: plan.products.name not in ("auto", "grouped"), "experts are grouped products there"
    ),
    _ForeignLine(
        "loss",
        lambda plan: plan.loss is not None and (plan.loss.form != "whole" or plan.loss.chunk > 0),
        "it computes the head as autograd does, all rows at once",
    ),
    _ForeignLine("shard", lambda plan: plan.shard_dense, "its distributed optimizer shards states of replicas alone"),
    _ForeignLine("fuse", lambda plan: plan.fuse is not None, "its fusions are flags of the model"),
)


@dataclass(frozen=True)
class MegatronPlan:
    """A plan beside the order that Megatron makes.

    layout: the kinds of layers, None where the plan places none. overlapped: whether Megatron overlaps the order's
    pairs. source: of the schedule, for findings.
    """

    plan: Plan
    layout: Layout | None
    overlapped: bool
    source: Source | None

    def flags(self) -> tuple[str, ...]:
        """The flags of all lines of the plan. Raises `DiagnosticError`.

        S607: states, exchanges or levels that Megatron does not have, or not beside its overlapped pairs. S614: a line
        without a flag.
        """
        for line in FOREIGN:
            if line.is_in(self.plan):
                message = f"Megatron has no flag for the `{line.word}` line of the plan"
                raise cannot("S614", message, line.why, "leave it out of the plan", self.source)
        self._check_overlap()
        parts = (self._model, self._experts, self._parallel, self._batch, self._dtype, self._recompute)
        return tuple(flag for part in parts for flag in part())

    def notes(self) -> tuple[str, ...]:
        """What else must hold, or differs there, as sentences."""
        plan, parallel = self.plan, self.plan.parallel
        found = []
        if plan.block or plan.experts:
            found.append(
                "The model needs flags that no plan says: activation, norms, positions, vocabulary, tied tables."
            )
            found.append("Windows and sinks of attention need flags, too, where the model has some.")
        if plan.experts is None and self._layer_kinds and self._total(PartKind.MOE):
            found.append(f"Experts, whose sizes no line says, need {self._layer_kinds} beside --num-experts.")
        if parallel and parallel.tp * parallel.cp > 1:
            found.append("Before Blackwell, tp and cp need CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment.")
        if self._dispatcher == "flex":
            found.append("Rows take two hops by DeepEP, which must be installed.")
        if plan.parallel and self.overlapped and not plan.overlap:
            found.append("Megatron overlaps the exchanges of pairs; the plan has no `overlap auto`.")
        if plan.block and plan.block.latent and Level.NORM <= self._level < Level.LAYER:
            found.append("Megatron holds the outputs of norms of narrow vectors, which the plan recomputes.")
        return tuple(found)

    def _refusal(self, message: str, why: str, nearest: str) -> DiagnosticError:
        return cannot("S607", message, why, nearest, self.source)

    def _total(self, kind: PartKind) -> int:
        """Layers of a kind; where nothing places layers, one of the kind that the plan is about."""
        if self.layout is None:
            return int((kind is PartKind.MOE) == (self.plan.experts is not None)) if kind is not PartKind.MTP else 0
        return self.layout.total(kind)

    @cached_property
    def _layer_kinds(self) -> str:
        """The flag that says which layers are dense; "" where nothing places layers, or none is dense."""
        if self.layout is None or not (dense := self._total(PartKind.DENSE)):
            return ""
        return f'--moe-layer-freq "([0]*{dense}+[1]*{self._total(PartKind.MOE)})"'

    # Sizes of the model.

    def _model(self) -> Iterator[str]:
        plan, block = self.plan, self.plan.block
        if plan.hidden:
            yield f"--hidden-size {plan.hidden}"
        if block is None:
            return
        if block.heads:
            yield f"--num-attention-heads {block.heads}"
        if block.latent:
            yield f"--multi-latent-attention --kv-lora-rank {block.latent}"
            yield f"--qk-head-dim {block.head} --qk-pos-emb-head-dim {block.rotary} --v-head-dim {block.head}"
            if block.query:
                yield f"--q-lora-rank {block.query}"
        else:
            if block.head:
                yield f"--kv-channels {block.head}"
            if block.keys:
                yield f"--group-query-attention --num-query-groups {block.keys}"
        if block.inner:
            yield f"--ffn-hidden-size {block.inner}"
            if block.matrices == 3:
                yield "--swiglu"

    def _experts(self) -> Iterator[str]:
        if (sizes := self.plan.experts) is None:
            return
        yield f"--num-experts {sizes.count} --moe-router-topk {sizes.top}"
        if sizes.groups > 1:
            yield f"--moe-router-num-groups {sizes.groups} --moe-router-group-topk {sizes.limit}"
        if sizes.width:
            yield f"--moe-ffn-hidden-size {sizes.width}"
            if sizes.shared:
                yield f"--moe-shared-expert-intermediate-size {sizes.shared * sizes.width}"
        if self._layer_kinds:
            yield self._layer_kinds
        yield "--moe-grouped-gemm"
        if self._dispatcher:
            yield f"--moe-token-dispatcher-type {self._dispatcher}"
        if self._dispatcher == "flex":
            yield "--moe-flex-dispatcher-backend deepep"
        if capacity := self.plan.capacity:
            yield f"--moe-expert-capacity-factor {capacity.factor:g} --moe-token-drop-policy {capacity.drop}"

    @cached_property
    def _dispatcher(self) -> str:
        """Megatron's word for the way of rows to their experts; "" where the plan leaves it open."""
        plan = self.plan
        if plan.experts is None or plan.method is Method.AUTO:
            return ""
        if plan.method is Method.ALLGATHER:
            return "allgather"
        if plan.method is Method.FLAT or (plan.topology is not None and plan.topology.nodes == 1):
            return "alltoall"
        if plan.topology is not None and plan.topology.per_node != _DEEPEP_NODE:
            message = f"Megatron has no hierarchical exchange over nodes of {plan.topology.per_node} ranks"
            raise self._refusal(message, f"rows take two hops by DeepEP, on nodes of {_DEEPEP_NODE}", "`alltoall flat`")
        return "flex"

    # The spread of a step.

    def _parallel(self) -> Iterator[str]:
        if (parallel := self.plan.parallel) is None:
            return
        if parallel.zero > 1:
            why = "its distributed optimizer shards the optimizer's state, neither gradients nor parameters"
            raise self._refusal(f"Megatron has no zero {parallel.zero} in a pipeline", why, "`zero 1`")
        yield f"--tensor-model-parallel-size {parallel.tp}"
        if parallel.tp > 1:
            yield "--sequence-parallel"
        yield f"--context-parallel-size {parallel.cp}"
        if self.plan.experts is not None:
            yield f"--expert-model-parallel-size {parallel.ep}"
            yield f"--expert-tensor-parallel-size {parallel.expert_tp}"
        if parallel.zero:
            yield "--use-distributed-optimizer"
        ranks, experts = parallel.dp * parallel.cp, parallel.ep * parallel.expert_tp
        if ranks > 1 or (self.plan.experts is not None and ranks * parallel.tp > experts):
            yield "--overlap-grad-reduce" + (" --overlap-param-gather" if parallel.zero else "")

    def _batch(self) -> Iterator[str]:
        if (batch := self.plan.batch) is None:
            return
        parallel = self.plan.parallel
        if parallel and parallel.cp > 1 and batch.tokens % (2 * parallel.cp):
            message = f"Megatron cannot share {batch.tokens} tokens among {parallel.cp} context ranks"
            raise self._refusal(
                message,
                "a rank has one piece from each half of a sequence",
                f"cp of which 2 x cp divides {batch.tokens}",
            )
        yield f"--micro-batch-size {batch.by}"
        yield f"--global-batch-size {batch.sequences}"
        yield f"--seq-length {batch.tokens}"

    def _dtype(self) -> Iterator[str]:
        dtype = self.plan.dtype
        if self.plan.experts is not None and dtype not in ("", "bf16"):
            message = f"Megatron has no grouped products of experts in {dtype}"
            raise self._refusal(message, "they take bf16", "`tokens ... dtype bf16`")
        if dtype in ("bf16", "fp16"):
            yield f"--{dtype}"

    # Recomputation and pairs.

    @property
    def _level(self) -> Level:
        """The highest level of any stage."""
        return max((each.level for each in self.plan.recompute), key=lambda level: level.place, default=Level.NONE)

    def _recompute(self) -> Iterator[str]:
        if self._level is Level.NONE:
            return
        first, *others = self.plan.recompute
        if any((each.level, each.layers) != (first.level, first.layers) for each in others) or first.layers:
            raise self._no_level(
                "levels that differ between layers", "its flags speak of all layers", "one level for all"
            )
        if first.adaptive is not None:
            raise self._no_level("adaptive levels", "it recomputes always", "a level without `adaptive`")
        if first.level is Level.LAYER:
            yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        else:
            yield f"--recompute-granularity selective --recompute-modules {' '.join(self._modules(first))}"

    def _modules(self, recompute: Recompute) -> tuple[str, ...]:
        """The modules that Megatron recomputes for a level of all layers below `layer`."""
        dense, experts = self._total(PartKind.DENSE) > 0, self.plan.experts is not None
        if recompute.level is Level.NORM:
            return ("layernorm",)
        if recompute.level is Level.FULL:
            return ("layernorm", *(("moe",) if experts else ()), *(("mlp",) if dense else ()))
        alone = dense or (self.plan.experts is not None and self.plan.experts.shared > 0)
        if recompute.level is Level.ACT and not alone:
            return "layernorm", "moe_act"
        why = "it recomputes the activation of routed experts alone, no other part of an MLP"
        raise self._no_level(f"`{recompute.level}` of these layers", why, "`none`, `full` or `layer`")

    def _no_level(self, what: str, why: str, nearest: str) -> DiagnosticError:
        return self._refusal(f"Megatron does not recompute {what}", why, nearest)

    def _check_overlap(self) -> None:
        """Raises `DiagnosticError` (S607) for what does not go with Megatron's overlapped pairs."""
        if not self.overlapped:
            return
        plan, predictions = self.plan, self._total(PartKind.MTP)
        alone = plan.parallel is not None and (plan.experts is None or plan.parallel.ep == 1)
        wrong = {
            "layers without expert ranks": alone,
            "rows that are gathered": self._dispatcher == "allgather",
            f"`recompute {self._level}`": self._level >= Level.FULL,
            f"{predictions} predictions": predictions > 1,
            f"numbers in {plan.dtype}": plan.dtype not in ("", "bf16", "fp16"),
        }
        if what := next((what for what, holds in wrong.items() if holds), None):
            why = "its overlapped pairs exclude it"
            nearest = "`interleaved_1f1b`, which has no pairs"
            raise self._refusal(f"Megatron has no overlapped pairs with {what}", why, nearest)
