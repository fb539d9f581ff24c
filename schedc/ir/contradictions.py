"""What the values of a plan contradict in each other: one list for plans in a text and for plans made in Python.

The reader of lines adds the place of each contradiction, the runtime the stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from schedc.ir.parallel import OF_ATTENTION, Parallel
from schedc.ir.plan import LOSS_FORMS, MOST_SLICES, PRODUCTS, By, Level, LevelRun, Plan, Recompute
from schedc.ir.scopes import is_chosen
from schedc.model.fusions import FUSIONS

MOST_ZERO = 3
HOST_REMEDY = "write `host 200 GB at 50 GB/s`, or the speeds of both lanes: `host 200 GB d2h 50 GB/s h2d 40 GB/s`"


@dataclass(frozen=True)
class Contradiction:
    """Values of a plan that contradict each other, wherever they were written.

    word: the directive whose line is wrong. index: of the element of ``recompute`` or ``slices`` that is wrong; None
    for others.
    """

    code: str
    message: str
    word: str
    help: str = ""
    notes: tuple[str, ...] = ()
    index: int | None = None


def contradictions(plan: Plan, ranks: int | None) -> Iterator[Contradiction]:
    """The contradictions of a plan.

    ranks: number that share the experts; None if unknown.
    """
    for of_directive in CONTRADICTIONS:
        yield from of_directive(plan, ranks)


def first_contradiction(plan: Plan) -> str:
    """Why a plan cannot be; "" for one that can."""
    ranks = plan.topology.ranks if plan.topology else None
    return next((fault.message for fault in contradictions(plan, ranks)), "")


def shown_levels(recompute: Recompute) -> str:
    """``medium``, or ``full 3 act 4`` where layers have levels of their own."""
    return " ".join(f"{run.level} {run.layers}" for run in recompute.layers) or str(recompute.level)


def _of_experts(plan: Plan, ranks: int | None) -> Iterator[Contradiction]:
    if plan.experts and ranks and plan.experts.count % ranks:
        message = f"{plan.experts.count} experts on {ranks} ranks"
        yield Contradiction("S145", message, "topology", "every rank holds equally many: take ranks that divide them")


def _of_block(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    block, experts = plan.block, plan.experts
    if block is None:
        return
    if experts and experts.hidden and block.hidden not in (0, experts.hidden):
        message = f"tokens of {block.hidden} columns in `block`, and of {experts.hidden} in `experts`"
        yield Contradiction("S146", message, "block", "say the columns of a token once")
    elif not plan.hidden:
        yield Contradiction("S146", "sizes of a block without the columns of a token", "block", "write `hidden 4096`")
    elif not block.head and block.heads and plan.hidden % block.heads:
        message = f"{block.heads} heads of {plan.hidden} columns"
        yield Contradiction("S146", message, "block", "say the columns of a head: `head 128`")
    if block.keys and block.heads % block.keys:
        message = f"{block.heads} heads over {block.keys} heads of keys"
        yield Contradiction("S146", message, "block", "each head of keys serves equally many: `heads 64 keys 8`")
    if (block.windowed or block.whole) and not block.window:
        message = "layers with a window, and no tokens of a window"
        yield Contradiction("S146", message, "block", "say the tokens: `window 128 windowed 18 whole 18`")
    if block.chunked and (block.chunked > 1 or not block.window):
        message = "chunks are a form of a window"
        yield Contradiction("S146", message, "block", "write `window 8192 chunked 1`, or leave `chunked` out")
    if block.unnormed > 2:
        message = f"{block.unnormed} inputs without a normed copy, of the two of attention and MLP"
        yield Contradiction("S146", message, "block", "write 1 or 2, or leave `unnormed` out")
    if block.matrices not in (2, 3):
        message = f"a dense MLP of {block.matrices} matrices"
        yield Contradiction("S146", message, "block", "write 3 for a gated one, which is the default, or 2")


def _of_states(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    if not 0 <= plan.states < inf:
        help = "16 for mixed precision with Adam; less where ranks share the optimizer's states; 0 for weights alone"
        yield Contradiction("S144", f"{plan.states:g} bytes for a parameter", "states", help)


def _of_capacity(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    capacity, experts, tokens = plan.capacity, plan.experts, plan.tokens
    if capacity is None:
        return
    if not 0 < capacity.factor < inf:
        help = "1 takes the mean number of rows, 1.25 a quarter more"
        yield Contradiction("S152", f"a capacity of {capacity.factor:g}", "capacity", help)
    elif experts and tokens and (room := tokens * experts.top / experts.count * capacity.factor) < 1:
        least = ceil(experts.count / (tokens * experts.top) * 100) / 100
        yield Contradiction(
            "S152",
            f"a capacity of {room:.3g} tokens: {tokens} tokens, top {experts.top} of {experts.count} experts",
            "capacity",
            f"take a factor from {least:g}, more tokens in a microbatch, or no capacity",
        )


_ASK_ROWS = {
    "padded": "rows that are padded to the most of an expert",
    "tiles": "rows in tiles of an expert",
}
"""Providers of products for which the host knows the rows of each expert, and what they do."""


def _of_products(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    name = plan.products.name
    if name not in PRODUCTS:
        yield Contradiction("S144", f"`{name}` is no way to multiply", "products", f"write {', '.join(PRODUCTS)}")
    elif name == "bmm" and plan.capacity is None and not plan.products.or_fallback:
        message = "one batched product, and experts with different numbers of rows"
        yield Contradiction("S144", message, "products", "add a `capacity`, or write `products bmm or fallback`")
    elif name in _ASK_ROWS and plan.bound is not None and not plan.products.or_fallback:
        message = f"{_ASK_ROWS[name]}, and sizes that only the device knows"
        yield Contradiction("S144", message, "products", f"write `sizes exact`, or `products {name} or fallback`")


def _of_sizes(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    if plan.bound is None:
        return
    if not 1 <= plan.bound < inf:
        help = "1 is the mean number of rows, 1.25 a quarter more: write a number from 1 on"
        yield Contradiction("S152", f"buffers of {plan.bound:g} times the mean rows", "sizes", help)
    if plan.capacity is not None:
        help = "a capacity has constant sizes already and drops rows; bounded buffers keep all rows: leave one line out"
        yield Contradiction("S144", "bounded sizes, and a capacity", "sizes", help)
    if plan.hot is not None:
        help = "hot experts follow the rows that the host knows: leave one line out"
        yield Contradiction("S144", "bounded sizes, and hot experts", "sizes", help)


def _of_hot(plan: Plan, ranks: int | None) -> Iterator[Contradiction]:
    hot, experts = plan.hot, plan.experts
    if hot is None or hot.most is None:
        return
    if hot.most == 0:
        yield Contradiction("S151", "no hot expert", "hot", "leave the line out, or write `hot auto`")
    elif experts and hot.most > (slots := experts.count // (ranks or 1)) > 0:
        own = f", and each rank has {slots} of its own" if ranks else f" of {slots}"
        help = f"a rank has a slot for a hot expert beside each of its own: write `hot {slots}`, or fewer"
        yield Contradiction("S151", f"{hot.most} hot experts{own}", "hot", help)


def _of_recompute(plan: Plan, ranks: int | None) -> Iterator[Contradiction]:
    for index, recompute in enumerate(plan.recompute):
        if (fault := _contradiction(recompute, ranks)) is not None:
            yield Contradiction(fault[0], fault[1], "recompute", *fault[2:], index=index)


def _contradiction(recompute: Recompute, ranks: int | None) -> tuple[str, str, str, tuple[str, ...]] | None:
    """(code, message, help, notes) of a level that contradicts itself, or the ranks that share the experts."""
    level, adaptive = recompute.level, recompute.adaptive
    if recompute.layers:
        if level is not Recompute.of_layers(recompute.layers).level or min(recompute.layers, key=_layers).layers < 1:
            help = "write `Recompute.of_layers([(Level.FULL, 3), (Level.ACT, 4)])`"
            return "S149", f"level {level} of the layers `{shown_levels(recompute)}`", help, ()
        if adaptive is not None:
            help = "give the stage one level, or leave `adaptive` out"
            return "S149", "levels of layers and `adaptive`", help, ()
    if adaptive is not None and (not adaptive >= 1 or level is Level.NONE):
        help = "it recomputes where a rank has more than so many times the mean: a number from 1, and a level"
        return "S149", f"`adaptive({adaptive:g})` of level {level}", help, ()
    if recompute.bubbles and (adaptive is not None or level is Level.NONE):
        help = "write for example `recompute full in bubbles`: what is placed is the same in all microbatches"
        mixed = "`adaptive`" if adaptive is not None else "level none"
        return "S149", f"a recomputation of {mixed} in bubbles", help, ()
    if adaptive is not None and recompute.by is By.RANK and level.exchanges and ranks != 1:
        message = f"each rank decides for itself about a region with collectives: `{level}` has them"
        help = (
            f"write `{level} adaptive({adaptive:g}) by group`, "
            f"or `{Level.MEDIUM} adaptive({adaptive:g})`, which holds none"
        )
        notes = ("a rank that dispatches again in backward waits for ranks that do not: the group would hang",)
        return "S150", message, help, notes
    return None


def _layers(run: LevelRun) -> int:
    return run.layers


def _of_slices(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    for index, count in enumerate(plan.slices):
        if not 1 <= count <= MOST_SLICES:
            help = f"write a number from 1 to {MOST_SLICES}"
            yield Contradiction("S153", f"a microbatch in {count} slices", "slices", help, index=index)
    if max(plan.slices, default=1) > 1:
        yield from _refused(plan)


def _of_balance(plan: Plan, ranks: int | None) -> Iterator[Contradiction]:
    if plan.balance is None:
        return
    own = plan.experts.count // ranks if plan.experts and ranks else None
    peers = plan.balance.peers(plan.topology.nodes, plan.topology.per_node) if plan.topology else None
    beside = {
        "nodes of one rank, which copies leave `over group` alone": peers == 1,
        "a `capacity`, under which all ranks have the same rows": plan.capacity is not None,
        "bounded sizes, which do not know copies of a microbatch": plan.bound is not None and plan.balance.by != "step",
        "`hot` experts with copies of their own": plan.hot is not None,
    }
    refusals = plan.balance.refusals(own=own, method=str(plan.method), beside=beside)
    yield from (Contradiction("S158", message, "balance", help) for message, help in refusals)


def _of_migrate(plan: Plan, ranks: int | None) -> Iterator[Contradiction]:
    if plan.migrate is not None:
        even = plan.balance is not None and plan.topology is not None and plan.topology.nodes == 1
        refusals = plan.migrate.refusals(alone=ranks == 1, capacity=plan.capacity is not None, even=even)
        yield from (Contradiction("S158", message, "migrate", help) for message, help in refusals)


def _refused(plan: Plan) -> Iterator[Contradiction]:
    """What would give other results in slices than in whole microbatches, or means nothing there."""
    if plan.cells:
        message = "`slices`, and an order of a cell by hand, which names no slices"
        yield Contradiction("S153", message, "slices", "leave the order to the compiler: write `overlap auto`")
    if plan.slices_of_tokens:
        if plan.parallel is not None and plan.parallel.tp == 1:
            message = "`slices` of tokens, and tp 1: no exchange of tensor ranks is there to hide"
            yield Contradiction("S153", message, "slices", "write `slices 4` for slices of rows, or leave the line out")
        return
    if plan.capacity is not None:
        message = "`slices`, and a `capacity`, which drops rows by those of a whole microbatch"
        help = "leave one of the two out; `sizes bounded 1.25` drops no rows, and asks the host for no sizes either"
        yield Contradiction("S153", message, "slices", help)
    if plan.hot is not None and plan.hot.by_microbatch:
        message = "`slices`, and hot experts that are chosen by whole microbatches"
        yield Contradiction("S153", message, "slices", "let them be chosen once per step: leave `by microbatch` out")
    if plan.balance is not None and plan.balance.by == "microbatch":
        message = "`slices`, and rows that are made even by whole microbatches"
        yield Contradiction("S153", message, "slices", "write `balance by step`, whose slices divide rows each")


def _of_host(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    if (host := plan.host) is not None and host.shared < 1:
        yield Contradiction("S146", f"lanes shared by {host.shared} ranks", "host", "give a number from 1")
    if plan.host is not None and not (plan.host.size > 0 and plan.host.out > 0 and plan.host.back > 0):
        yield Contradiction("S146", "host memory, or a speed of its lanes, that is not above 0", "host", HOST_REMEDY)


def _of_offload(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    if plan.offload and plan.host is None:
        help = "write `host 200 GB at 50 GB/s`: memory of a rank on the host, and the speed of its lanes"
        yield Contradiction("S155", "activations leave, and the plan says nothing of host memory", "offload", help)
    if len(plan.offload) > 1 and is_chosen(plan):
        yield Contradiction("S155", "`offload auto` beside another line", "offload", "keep one of them")


def _of_loss(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    loss = plan.loss
    if loss is None:
        return
    if loss.form not in LOSS_FORMS:
        yield Contradiction("S146", f"a loss of the form `{loss.form}`", "loss", f"write {', '.join(LOSS_FORMS)}")
    if min(loss.chunk, loss.vocab) < 0:
        yield Contradiction("S146", "a loss with a negative size", "loss", "write 1 or more, or leave it out")
    if loss.form == "whole" and loss.chunk:
        help = "write `loss early` or `loss again` for chunks, or leave `chunk` out"
        yield Contradiction("S144", "a whole loss, in chunks", "loss", help)


def _of_parallel(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    if (parallel := plan.parallel) is None:
        return
    faults = [*_number_faults(parallel)] or [*_device_faults(parallel)] or [*_expert_faults(parallel, plan)]
    if not faults and plan.shard_dense and parallel.zero != MOST_ZERO:
        faults.append((f"`shard dense` beside zero {parallel.zero}", "write `zero 3`, which says the same"))
    block = plan.block
    if not faults and block is not None and block.heads % parallel.tp:
        help = f"`tp` is a divisor of the {block.heads} heads of the `block` line"
        faults.append((f"tp {parallel.tp} of {block.heads} heads", help))
    for message, help in faults:
        yield Contradiction("S156", message, "parallel", help)


def _number_faults(parallel: Parallel) -> Iterator[tuple[str, str]]:
    """(message, help) of numbers that mean nothing; a line of a plan is refused earlier, at the number."""
    if min(parallel.tp, parallel.cp, parallel.ep, parallel.dp) < 1 or min(parallel.devices, parallel.node) < 0:
        yield f"{parallel} has an axis without ranks", "numbers of ranks begin at 1"
    if not 0 <= parallel.zero <= MOST_ZERO or parallel.of not in ("", OF_ATTENTION):
        yield f"{parallel}", f"`zero` is from 0 to {MOST_ZERO}, `of` is `{OF_ATTENTION}` or empty"


def _device_faults(parallel: Parallel) -> Iterator[tuple[str, str]]:
    product = f"tp {parallel.tp} x cp {parallel.cp} x dp {parallel.dp} = {parallel.per_rank:,}"
    if parallel.devices % parallel.per_rank:
        help = f"the devices are {product} for each rank of the pipeline"
        yield f"{parallel.devices:,} devices are no multiple of {product}", help
    if parallel.node and parallel.devices % parallel.node:
        yield f"{parallel.devices:,} devices in nodes of {parallel.node}", "nodes are full: give a multiple"


def _expert_faults(parallel: Parallel, plan: Plan) -> Iterator[tuple[str, str]]:
    group = f"ep {parallel.ep}" + f" x tp {parallel.expert_tp}" * (parallel.expert_tp > 1)
    if parallel.ep > 1 and plan.experts is None:
        yield f"ep {parallel.ep}, and no experts", "write `experts 256 top 8`, or leave `ep` out"
    elif parallel.per_rank % parallel.expert_group:
        help = f"`ep` divides the {parallel.per_rank:,} devices of a pipeline rank, tp x cp x dp"
        help += "; `tp 8 of attention` leaves experts whole" * (parallel.expert_tp > 1)
        yield f"{group} does not divide tp {parallel.tp} x cp {parallel.cp} x dp {parallel.dp}", help
    elif plan.experts is not None and plan.experts.count % parallel.ep:
        yield f"{plan.experts.count} experts on ep {parallel.ep} ranks", "every rank holds equally many experts"
    elif parallel.node and parallel.shape() is None:
        help = "an expert group fills whole nodes, or a node holds whole groups"
        yield f"{group} in nodes of {parallel.node} devices: a group begins in the middle of a node", help
    elif (topology := plan.topology) is not None:
        shape = parallel.shape()
        nodes, per_node = shape or (topology.nodes, topology.per_node)
        if topology.ranks != parallel.ep:
            message = f"ep {parallel.ep}, and a topology of {topology.nodes} x {topology.per_node} ranks"
            yield message, "the topology speaks of the ranks that share experts"
        elif (topology.nodes, topology.per_node) != (nodes, per_node):
            message = f"a topology of {topology.nodes} nodes x {topology.per_node}, and ep {parallel.ep}"
            yield (
                f"{message} in nodes of {parallel.node} devices",
                f"ranks lie in the order tp, cp, dp, then the pipeline: write `topology nodes {nodes} x {per_node}`",
            )


def _of_batch(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    if (batch := plan.batch) is None:
        return
    split = plan.parallel or Parallel()
    ranks = split.tp * split.cp
    if min(batch.sequences, batch.tokens, batch.by) < 1:
        message = f"a batch of {batch.sequences} sequences of {batch.tokens} tokens, {batch.by} in a microbatch"
        yield Contradiction("S157", message, "batch", "write `batch 4608 x 8192 by 1`: numbers from 1")
    elif ranks > 0 and batch.tokens % ranks:
        message = f"a sequence of {batch.tokens} tokens over tp {split.tp} x cp {split.cp} ranks"
        yield Contradiction("S157", message, "batch", "every rank has equally many tokens of a sequence")
    elif plan.block is not None and plan.block.sequence not in (0, batch.tokens):
        message = f"sequences of {batch.tokens} tokens in `batch`, and of {plan.block.sequence} in `block`"
        yield Contradiction("S157", message, "batch", "say the tokens of a sequence once")


def _of_fuse(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    for name in plan.fuse.names if plan.fuse is not None else ():
        if name not in FUSIONS:
            yield Contradiction("S144", f"`{name}` is no fusion", "fuse", f"write {', '.join(FUSIONS)}")


def _of_attention(plan: Plan, _: int | None) -> Iterator[Contradiction]:
    if not plan.attention:
        return
    if not 0 < plan.attention < float("inf"):
        yield Contradiction("S146", f"{plan.attention} bytes of attention", "attention", "give bytes per token above 0")
    elif not (plan.has_expert_sizes or plan.has_dense_sizes):
        help = "say them: `experts ... width 2048 hidden 7168`, or `block hidden 7168 inner 18432`"
        yield Contradiction("S146", "bytes of attention in layers of no known sizes", "attention", help)


CONTRADICTIONS = (
    _of_experts,
    _of_block,
    _of_states,
    _of_capacity,
    _of_products,
    _of_sizes,
    _of_hot,
    _of_balance,
    _of_migrate,
    _of_recompute,
    _of_slices,
    _of_host,
    _of_offload,
    _of_loss,
    _of_parallel,
    _of_batch,
    _of_fuse,
    _of_attention,
)
"""By directive, in the order of a plan's canonical text: contradictions among its values, or with other directives.

Each yields contradictions of a plan. Its second argument is the number of ranks that share the experts, or None."""
