"""One way to train a model on a cluster: the model, the machine, and how work is spread over the devices."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.model.sizes import LayerKind, ModelSizes
from schedc.planner.cluster.values import Cluster


@dataclass(frozen=True)
class TrainingRun:
    """A training step, as far as its time and memory depend on it.

    tp, pp, dp, ep, cp: devices of a tensor, pipeline, data, expert and context group. vpp: stages of a rank.
    microbatch: sequences of a microbatch. microbatches: those of a pipeline and step. schedule: name in the library.
    limit: activations that an order by costs may hold, in microbatches per rank; 0 for orders that take none.
    recompute: `none`, `attention` (its scores) or `full` (layers). fused: whether scores stay out of memory.
    sequence_parallel: whether tensor ranks share norms and residuals. zero: level of sharding, 3 for FSDP. overlap:
    whether sums of gradients run beside backwards. graphs, attention_graphs: whether all kernels, or those of attention
    and router alone, are launched as graphs. dropout: whether layers drop activations. grad_bytes: bytes of a gradient
    as it is summed. block_scales: whether products in 8 bits have a scale per block. chunked_tp: whether exchanges
    between tensor ranks run in chunks beside their products. hides_rows: whether rows travel to experts beside compute
    of other microbatches. alltoall: how rows reach their experts, a method of `schedc.step.costs.exchange`. skew: rows
    of the fullest rank of an expert group over the mean.
    """

    model: ModelSizes
    cluster: Cluster
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    microbatch: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    limit: int = 0
    precision: str = "bf16"
    recompute: str = "none"
    fused: bool = True
    sequence_parallel: bool = False
    zero: int = 0
    overlap: bool = False
    graphs: bool = False
    grad_bytes: int = 2
    dropout: bool = False
    alltoall: str = "flat"
    skew: float = 1.0
    block_scales: bool = False
    hides_rows: bool = False
    attention_graphs: bool = False
    chunked_tp: bool = False

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.microbatch * self.microbatches

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch in a rank's part of the context."""
        return self.microbatch * self.model.seq / self.cp

    @property
    def pipelined(self) -> bool:
        return self.pp > 1

    @property
    def split(self) -> bool:
        """Whether weight gradients are ops of their own."""
        return self.schedule.startswith("zb")

    @property
    def free_steps(self) -> bool:
        """Whether ranks start the next step without a wait: zero-bubble schedules check the optimizer afterwards.

        Source: Qi et al., arXiv 2401.10241, section 4, whose step times are of this kind.
        """
        return self.split

    @property
    def fully_sharded(self) -> bool:
        return self.zero >= 3

    @property
    def recomputes_layers(self) -> bool:
        return self.recompute == "full"

    @property
    def recomputes_scores(self) -> bool:
        return self.recompute == "attention"

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def layer_ranges(self) -> list[range]:
        """[stages] numbers of the layers of each stage.

        Even where the stages divide the layers. Else the embedding and the head count as layers, if they fill the
        stages then; else the first stages have a layer more.
        """
        layers, stages = self.model.layers, self.stages
        each, more = divmod(layers, stages)
        counts = [each + (stage < more) for stage in range(stages)]
        if stages > 1 and more and (layers + 2) % stages == 0:
            each = (layers + 2) // stages
            counts = [each - (stage in (0, stages - 1)) for stage in range(stages)]
        ends = [sum(counts[: stage + 1]) for stage in range(stages)]
        return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def layers_of(self) -> list[tuple[int, int]]:
        """[stages] dense and MoE layers of each stage."""
        kinds = [[self.model.kind_of(layer) for layer in layers] for layers in self.layer_ranges()]
        return [(stage.count(LayerKind.DENSE), stage.count(LayerKind.MOE)) for stage in kinds]
