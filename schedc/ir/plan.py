"""The values that a plan attaches to a schedule besides layers: plain data that the runtime reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from schedc.ir.balance import Balance as Balance
from schedc.ir.migrate import Migrate as Migrate
from schedc.ir.parallel import GlobalBatch, Parallel
from schedc.model.levels import BYTES as BYTES
from schedc.model.levels import Level as Level
from schedc.model.levels import bytes_per_number as bytes_per_number


@dataclass(frozen=True)
class Topology:
    """The ranks that share the experts: ``nodes`` times ``per_node``, rank = node * per_node + position.

    rail, node: bytes per second that a rank sends to other nodes, and to the others of its node; 0 where not said.
    """

    nodes: int
    per_node: int
    rail: float = 0.0
    node: float = 0.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of a model's blocks beside those of experts. 0: the plan does not say it.

    hidden: columns of a token. heads: heads of attention. head: columns of a head; by default hidden / heads. keys:
    heads of keys and values; by default as many as of queries. query, latent: columns of the narrow vectors that
    queries, and keys and values, come from. rotary: columns of a head beside ``head`` that only carry the position.
    inner: columns between the products of a dense MLP. matrices: of this MLP, 3 if gated, else 2. sequence:
    tokens of a sequence. window: tokens that some layers look back, themselves included. windowed, whole: how many
    layers have the window, for how many without; by default all have it. chunked: 1 where they look back within chunks
    of so many tokens. unnormed: inputs, of the two of attention and MLP, that have no normed copy of their own.
    """

    hidden: int = 0
    heads: int = 0
    head: int = 0
    keys: int = 0
    query: int = 0
    latent: int = 0
    rotary: int = 0
    inner: int = 0
    matrices: int = 3
    sequence: int = 0
    window: int = 0
    windowed: int = 0
    whole: int = 0
    chunked: int = 0
    unnormed: int = 0


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a model's MoE layers.

    count: routed experts. top: routed experts per token. groups, limit: the experts of a token lie in ``limit`` of
    ``groups`` equal parts. shared: experts that every token takes. width: columns between the two products of an
    expert. hidden: columns of a token. 0: the plan does not say it.
    """

    count: int
    top: int
    groups: int = 1
    limit: int = 1
    shared: int = 0
    width: int = 0
    hidden: int = 0


class Method(StrEnum):
    """How rows travel to their experts. AUTO: `schedc.step.costs.exchange.choose` decides once the ranks are known."""

    FLAT = "flat"
    HIERARCHICAL = "hierarchical"
    ALLGATHER = "allgather"
    AUTO = "auto"


class Drop(StrEnum):
    """Which rows an expert drops above its capacity: rows of least weight, or the last rows."""

    PROBS = "probs"
    POSITION = "position"


@dataclass(frozen=True)
class Capacity:
    """The most rows of an expert from one rank: ceil(tokens * top / experts * factor).

    drop: which rows go beyond that; of rows with equal weights, the last ones.
    """

    factor: float
    drop: Drop = Drop.PROBS


PRODUCTS = ("auto", "loop", "bmm", "grouped", "padded", "tiles", "triton", "scaled_grouped", "quantized")
"""Who may multiply rows by the matrices of their experts; ``auto``: the best that can serve a layer, in its dtype."""
PRECISIONS = {"fp8": "scaled_grouped"}
"""The provider of each precision of products."""


@dataclass(frozen=True)
class Products:
    """Who multiplies rows by the matrices of their experts.

    name: one of `PRODUCTS`. or_fallback: where the named one cannot serve a layer, its fallback, or else as ``auto``.
    """

    name: str = "auto"
    or_fallback: bool = False


@dataclass(frozen=True)
class Hot:
    """Experts copied to all ranks for a step.

    most: the largest number of them; None for as many as pay. below: no expert is hot while the fullest rank has less
    than ``below`` times the mean number of rows. With None, only the gain in time decides. by_microbatch: they are
    chosen anew, and copied, for each microbatch.
    """

    most: int | None = None
    below: float | None = None
    by_microbatch: bool = False


class By(StrEnum):
    """Who decides: each rank by its own rows, or the ranks of a group together by the fullest of them."""

    RANK = "rank"
    GROUP = "group"


class LevelRun(NamedTuple):
    """A number of layers that follow each other in a stage, and their level."""

    level: Level
    layers: int


@dataclass(frozen=True)
class Recompute:
    """What the backwards of a stage recompute.

    level: the highest level of the stage's layers. adaptive: recompute only where a rank has more than this many times
    the mean number of rows; None: always. by: who decides that. bubbles: the compiler places an R before each backward
    that its rank would idle for. layers: levels from the stage's first layer on, ``none`` for the layers behind them;
    empty where everything in the stage has ``level``.
    """

    level: Level = Level.NONE
    adaptive: float | None = None
    by: By = By.GROUP
    bubbles: bool = False
    layers: tuple[LevelRun, ...] = ()

    @classmethod
    def of_layers(cls, runs: Iterable[tuple[Level, int]], bubbles: bool = False) -> Recompute:
        """Levels of layers: (level, number of layers) from the stage's first layer on."""
        layers = tuple(LevelRun(*run) for run in runs)
        level = max((run.level for run in layers), key=lambda level: level.place)
        by = By.GROUP if level.exchanges else By.RANK
        return cls(level, None, by, bubbles and level is not Level.NONE, layers)

    def of_layer(self, number: int) -> Level:
        """The level of the stage's layer ``number``, from 0; -1 for what lies outside of layers."""
        if not self.layers:
            return self.level
        last = 0
        for run in self.layers if number >= 0 else ():
            last += run.layers
            if number < last:
                return run.level
        return Level.NONE

    def of_layers_up_to(self, count: int) -> tuple[Level, ...]:
        """[count] the levels of the stage's first layers."""
        return tuple(self.of_layer(number) for number in range(count))


@dataclass(frozen=True)
class CellPlan:
    """A written order inside overlapped pairs, for each pair of layers.

    kind: ``FB``, or ``FI`` where the weight gradient is deferred. compute, communication: the steps of both lanes, as
    ``B.experts.I`` and ``F.dispatch``.
    """

    kind: str
    compute: tuple[str, ...]
    communication: tuple[str, ...]


@dataclass(frozen=True)
class Host:
    """Host memory of a rank. size: bytes. out, back: bytes per second on the lanes d2h and h2d.

    shared: ranks of a machine with common speeds. Each has its part of them, as when all move at once.
    Where the memory of the plan has no unit these are in its unit, and per unit of time of the costs.
    """

    size: float
    out: float
    back: float
    in_bytes: bool = True
    shared: int = 1


@dataclass(frozen=True)
class Offload:
    """Activations that leave for host memory. scope: ``all``, ``chunk``, ``stage`` or ``auto``.

    numbers: which chunks or stages. keep: how many microbatches of a stage, the newest ones, stay on the device between
    two cells. roles: segments whose activations leave, of `HELD_ROLES`; empty for everything that is held.
    """

    scope: str
    numbers: tuple[int, ...] = ()
    keep: int = 0
    roles: tuple[str, ...] = ()


CELL_SEGMENTS = ("attention", "permute", "relay", "experts", "relay_back", "shared", "post")
CELL_EXCHANGES = ("routing", "distinct", "dispatch", "combine", "hot", "balance")
"""Roles of a layer's steps, on the compute lane and on those of exchanges, that a written order may name."""
HELD_ROLES = ("attention", "experts", "shared", "dense")
"""Roles of segments whose activations may leave alone: of a MoE layer the first three, of a dense layer the last."""


@dataclass(frozen=True)
class Fuse:
    """The chains of operations that run fused.

    names: rows of `schedc.model.fusions.FUSIONS`; empty for all that a model has. compiled: torch.compile makes their
    kernels.
    """

    names: tuple[str, ...] = ()
    compiled: bool = False


MOST_SLICES = 64
"""Most slices of a microbatch; more is a mistake of the writer."""
LOSS_FORMS = ("whole", "early", "again")
"""When the products of a head run: as autograd does; all in F; or logits anew in I and in W."""


@dataclass(frozen=True)
class HeadLoss:
    """How head and loss are computed.

    form: one of `LOSS_FORMS`. chunk: rows whose logits are there at once; 0 where the plan does not say it.
    vocab: columns of the logits; 0 where the plan does not say them.
    """

    form: str
    chunk: int = 0
    vocab: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything that a plan attaches to a schedule; a default is what holds without the directive.

    tokens: tokens of one microbatch on one rank; 0 where the plan does not say it. dtype: type of activations and
    weights, a key of `BYTES`; "" where the plan does not say it. tied: whether head and predictions use the table of
    the embedding. fp8_rows: whether rows travel to their experts in fp8. states: bytes of gradient and optimizer for a
    parameter, beside its weight. block: sizes of attention and dense layers.
    overlap: whether pairs run as cell programs; those of a kind in ``cells`` in its order. bound: rows of buffers over
    their mean; None: as many as there are.
    recompute: [stages] levels; empty where no stage recomputes.
    slices: [stages] number of slices of a microbatch; empty where no stage has more than one. slices_of_tokens: whether
    slices are of the tokens of its sequences, between gathers and scatters of tensor ranks; else of its rows.
    offload: the lines about what leaves for the host. loss: how head and loss are computed, if the plan says it.
    shard_dense: whether replicas shard the dense parameters of a stage.
    parallel: the devices of a pipeline rank. batch: the sequences of a step. attention: bytes
    per token that attention holds; 0: those of its sizes.
    fuse: chains of operations that run as one; None where blocks run as they are.
    communicators: the most communicators for messages on a rank; 0 where the plan does not say it.
    """

    experts: ExpertSizes | None = None
    topology: Topology | None = None
    tokens: int = 0
    dtype: str = ""
    method: Method = Method.FLAT
    tied: bool = False
    overlap: bool = False
    cells: tuple[CellPlan, ...] = ()
    capacity: Capacity | None = None
    bound: float | None = None
    products: Products = Products()
    balance: Balance | None = None
    migrate: Migrate | None = None
    hot: Hot | None = None
    recompute: tuple[Recompute, ...] = field(default=())
    fp8_rows: bool = False
    states: float = 0.0
    slices: tuple[int, ...] = ()
    slices_of_tokens: bool = False
    block: BlockSizes | None = None
    host: Host | None = None
    offload: tuple[Offload, ...] = ()
    loss: HeadLoss | None = None
    shard_dense: bool = False
    parallel: Parallel | None = None
    batch: GlobalBatch | None = None
    attention: float = 0.0
    fuse: Fuse | None = None
    communicators: int = 0

    def recompute_of(self, stage: int) -> Recompute:
        """The level of a stage."""
        return self.recompute[stage] if self.recompute else Recompute()

    @property
    def row_slices(self) -> tuple[int, ...]:
        """[stages] number of slices of the rows of a microbatch; empty where no stage has more than one."""
        return () if self.slices_of_tokens else self.slices

    @property
    def token_slices(self) -> tuple[int, ...]:
        """[stages] number of slices of the tokens of a microbatch; empty where no stage has more than one."""
        return self.slices if self.slices_of_tokens else ()

    @property
    def ordered(self) -> bool:
        """Whether cells run as cell programs that the compiler or the plan orders: pairs, or any cell in slices."""
        return self.overlap or bool(self.cells) or max(self.slices, default=1) > 1

    @property
    def copies_experts(self) -> bool:
        """Whether ranks compute rows with copies of other ranks' experts."""
        return self.balance is not None or self.hot is not None

    @property
    def copies_by_microbatch(self) -> bool:
        """Whether weights of experts travel in every microbatch."""
        by_microbatch = self.balance is not None and self.balance.by == "microbatch"
        return by_microbatch or (self.hot is not None and self.hot.by_microbatch)

    @property
    def has_expert_sizes(self) -> bool:
        """Whether the plan says the columns of its experts."""
        return self.experts is not None and bool(self.experts.width and self.experts.hidden)

    @property
    def has_dense_sizes(self) -> bool:
        """Whether the plan says the columns of a dense layer."""
        return self.block is not None and bool(self.block.inner and self.hidden)

    @property
    def hidden(self) -> int:
        """Columns of a token; 0 where the plan does not say them."""
        said = self.experts.hidden if self.experts else 0
        return said or (self.block.hidden if self.block else 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row; 0 where the plan does not say its columns."""
        return self.experts.hidden * bytes_per_number(self.dtype) if self.experts else 0

    @property
    def dispatch_row_bytes(self) -> int:
        """Bytes of a token's row on its way to the experts; 0 where the plan does not say its columns."""
        if not (self.fp8_rows and self.experts and self.row_bytes):
            return self.row_bytes
        return self.experts.hidden * BYTES["fp8"] + bytes_per_number(self.dtype)

    @property
    def dispatch_bytes(self) -> float:
        """Bytes of one row for each token of a microbatch, by which methods of All-to-All are compared; 1 at least."""
        return float(max(self.dispatch_row_bytes, 1) * max(self.tokens, 1))


NO_PLAN = Plan()
"""A plan that attaches nothing."""
