"""The table of the words that begin a line of a plan: the single source of words for everything about text.

Everything about text follows from a row: the tokens, the parser's recovery, the formatter, error messages and hover
texts. So do the Pygments lexer and the lines that `tests/project/fuzz_plans.py` writes. The grammar of the editors is
written again by `schedc.editor.textmate`; a test says when. The table lies
in `syntax`, below the values of a plan, so that the tokens can read it. `schedc.plan.directives` has, by its word, what
a directive means. The order here is that of the docs; `DIRECTIVES` has the order of a canonical text.

The column ``token`` names the form of a line. A new word with a form that exists (``SETTING``: a name, ``FACTOR``: a
number and at most one option) needs no grammar: a row here is all. A new form is a rule in `grammar.lark` under a new
token, its method in `build.py` and its line in `plan.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from schedc.diagnostics import did_you_mean
from schedc.model.fusions import FUSIONS


class PlanWord(NamedTuple):
    """A word that begins a line of a plan.

    token: its form, a terminal of the grammar. form: one right line. meaning: what the line says, for hover texts.
    names: the names that may stand in the line, and so begin a line of the text where the line goes on.
    """

    word: str
    token: str
    form: str
    meaning: str
    names: tuple[str, ...] = ()


_KINDS = ("embedding", "dense", "moe", "mtp", "head")

PLAN_WORDS = (
    PlanWord(
        "layers",
        "LAYERS",
        "layers 61 dense 3 mtp 1 pad 3 at last",
        "the layers of the model, and where they lie",
        ("dense", "mtp", "pad", "last", "first", "auto"),
    ),
    PlanWord(
        "layout",
        "LAYOUT",
        'layout "Et*3|(tt|)*2m|L" dense 3',
        "the parts of every stage, as Megatron writes them",
        ("dense",),
    ),
    PlanWord(
        "costs",
        "TABLE",
        "costs dense 1 moe 1.5",
        "time of an embedding, a dense or moe layer, a prediction (mtp), the head",
        _KINDS,
    ),
    PlanWord(
        "parameters",
        "TABLE",
        "parameters dense 200 MB moe 1.2 GB",
        "memory that a part of each kind holds all the time",
        _KINDS,
    ),
    PlanWord(
        "activations",
        "TABLE",
        "activations dense 300 MB",
        "memory of one microbatch in a part of each kind",
        _KINDS,
    ),
    PlanWord("memory", "MEMORY", "memory 80 GB", "the most that a rank may hold, with a unit or without"),
    PlanWord(
        "tied",
        "SETTING",
        "tied embedding",
        "the head and the predictions use the table of the embedding",
        ("embedding",),
    ),
    PlanWord(
        "experts",
        "EXPERTS",
        "experts 256 top 8 groups 8 limit 4 shared 1 width 2048 hidden 7168",
        "the experts of a MoE layer, how many a token takes, their sizes, and precision fp8 of their products",
        ("top", "groups", "limit", "shared", "width", "hidden", "precision", "fp8", "fallback"),
    ),
    PlanWord(
        "block",
        "TABLE",
        "block hidden 7168 heads 128 inner 18432",
        "sizes of attention and dense layers: columns of tokens, heads, columns of a head, inner columns",
        (
            "hidden",
            "heads",
            "head",
            "keys",
            "query",
            "latent",
            "rotary",
            "inner",
            "matrices",
            "sequence",
            "window",
            "windowed",
            "whole",
            "chunked",
            "unnormed",
        ),
    ),
    PlanWord(
        "topology",
        "TOPOLOGY",
        "topology nodes 4 x 8 rail 50 GB/s node 400 GB/s",
        "the ranks that share experts, and the speeds of their links",
        ("nodes", "x", "rail", "node"),
    ),
    PlanWord(
        "tokens",
        "TOKENS",
        "tokens 4096 dtype bf16",
        "tokens of a microbatch on a rank, and dtype bf16, fp16, fp32 or fp8",
        ("dtype", "bf16", "fp16", "fp32", "fp8"),
    ),
    PlanWord(
        "states",
        "FACTOR",
        "states 16",
        "bytes of gradient and optimizer for each parameter, beside its weight, where parameters follow from sizes",
    ),
    PlanWord(
        "alltoall",
        "SETTING",
        "alltoall auto",
        "flat, hierarchical, allgather or auto, chosen by copies and link speeds",
        ("flat", "hierarchical", "allgather", "auto"),
    ),
    PlanWord(
        "rows",
        "SETTING",
        "rows fp8",
        "in which type rows travel to their experts: same as in the model, or fp8 with a scale each",
        ("same", "fp8"),
    ),
    PlanWord(
        "overlap",
        "SETTING",
        "overlap auto",
        "auto runs pairs as cell programs, off as one op after the other",
        ("auto", "off"),
    ),
    PlanWord(
        "capacity",
        "FACTOR",
        "capacity 1.25 drop probs",
        "rows of an expert over their mean, the others are dropped, by probs or position",
        ("drop", "probs", "position"),
    ),
    PlanWord(
        "products",
        "PRODUCTS",
        "products grouped or fallback",
        "who multiplies rows by experts: auto, loop, bmm, grouped, padded, tiles, triton, in fp8 scaled_grouped or"
        " quantized; or fallback: another, where that one cannot",
        ("auto", "loop", "bmm", "grouped", "padded", "tiles", "triton", "scaled_grouped", "quantized", "fallback"),
    ),
    PlanWord(
        "sizes",
        "SIZES",
        "sizes bounded 1.25",
        "sizes of exchanges: exact, which the host copies, or bounded: buffers of so many times the mean rows",
        ("exact", "bounded"),
    ),
    PlanWord(
        "hot",
        "HOT",
        "hot 3 until imbalance < 1.2",
        "experts copied to all ranks for a step, by the rows of the last one; hot auto: as many as pay; by microbatch:"
        " chosen anew for each",
        ("auto", "by", "microbatch", "until", "imbalance"),
    ),
    PlanWord(
        "balance",
        "BALANCE",
        "balance by microbatch within 1.02",
        "rows of experts made even by copies of experts, chosen anew for each microbatch; within: most rows of a rank"
        " over the mean; in place: the same pieces at home, to compare bits",
        ("by", "step", "microbatch", "auto", "within", "slots", "over", "node", "group"),
    ),
    PlanWord(
        "migrate",
        "MIGRATE",
        "migrate every 50 steps when gain > 1 %",
        "experts that move to other ranks between steps, if a step's gain less moves exceeds so many percent of a"
        " rank's expert time",
        ("every", "steps", "gain"),
    ),
    PlanWord(
        "recompute",
        "RECOMPUTE",
        "recompute chunk 0 medium adaptive(2.0) by rank",
        "what backward works out again: none, norm, act, light, medium, full or layer; adaptive(2.0), or in bubbles;"
        " stage 0 full 3 act 4: so many layers at each level; auto: what `memory` asks for",
        (
            "all",
            "auto",
            "chunk",
            "adaptive",
            "by",
            "group",
            "bubbles",
            "none",
            "norm",
            "act",
            "light",
            "medium",
            "full",
            "layer",
        ),
    ),
    PlanWord(
        "slices",
        "SLICES",
        "slices chunk 0 2",
        "a microbatch runs as so many slices of its rows in each cell, of all stages, a chunk or stage; auto: fastest;"
        " of tokens: of its sequences, between exchanges of tensor ranks",
        ("chunk", "auto", "of", "tokens"),
    ),
    PlanWord(
        "host",
        "HOST",
        "host 200 GB at 50 GB/s",
        "host memory of a rank, and the speed at which its lanes d2h and h2d move activations, or at: of both;"
        " shared by 8: by so many ranks",
        ("at", "d2h", "h2d", "shared", "by"),
    ),
    PlanWord(
        "offload",
        "OFFLOAD",
        "offload stage 0 keep 2",
        "which activations leave for host memory until their backward: of all, a chunk or stages, but for the newest"
        " ones that it keeps; of: those of some segments; auto: as few as the memory asks for",
        ("all", "chunk", "of", "keep", "auto"),
    ),
    PlanWord(
        "loss",
        "LOSS",
        "loss early chunk 1024 vocab 128256",
        "head and loss: whole, early with gradients in the forward, or again with logits made anew in the backward;"
        " chunk: rows whose logits are there at once",
        ("whole", "early", "again", "chunk", "vocab"),
    ),
    PlanWord(
        "shard",
        "SETTING",
        "shard dense",
        "the dense parameters of a stage are sharded over the replicas of its rank, and gathered for their uses",
        ("dense",),
    ),
    PlanWord(
        "parallel",
        "PARALLEL",
        "parallel tp 8 of attention cp 1 ep 32 dp 48 zero 1",
        "how a step is spread beside its pipeline: tensor (of attention: experts stay whole), context, expert and data"
        " parallel ranks; which states are sharded (zero); devices in all, and of a node",
        ("devices", "node", "tp", "of", "attention", "cp", "ep", "dp", "zero"),
    ),
    PlanWord(
        "batch",
        "BATCH",
        "batch 4608 x 8192 by 1",
        "sequences of a step, the tokens of one, and sequences of a microbatch on a replica",
        ("x", "by"),
    ),
    PlanWord(
        "fuse",
        "FUSE",
        "fuse gated rope",
        f"chains of operations that run as one: {', '.join(FUSIONS)},"
        " or auto: all that the model has; compiled: by kernels of torch.compile",
        (*FUSIONS, "auto", "compiled"),
    ),
    PlanWord(
        "attention",
        "ATTENTION",
        "attention 25 KB",
        "bytes per token that the attention of a layer holds, in place of those that follow from the sizes",
    ),
    PlanWord(
        "communicators",
        "FACTOR",
        "communicators 2",
        "the most communicators for messages on a rank, each of which is one queue; without the line 4",
    ),
    PlanWord(
        "cell",
        "CELL",
        "cell F & B { compute B.mlp.I F.mlp comm F.dispatch }",
        "the order inside a pair by hand, or cell F & B auto",
        ("auto",),
    ),
)

PLAN_LINES: dict[str, str] = {row.word: row.token for row in PLAN_WORDS}
"""The words that begin a line of a plan, and their tokens; elsewhere they are names."""

FORMS: dict[str, str] = {row.word: row.form for row in PLAN_WORDS}
"""A correct line for each first word."""

NAMES: dict[str, tuple[str, ...]] = {row.word: row.names for row in PLAN_WORDS}
"""The names that may stand in the lines of each word."""

INSIDE = frozenset(name for row in PLAN_WORDS for name in row.names)
"""The names that may stand in any line."""


def begins_nothing(word: str) -> bool:
    """Whether a name at the begin of a line of the text is neither part of a line of the plan nor nearly one."""
    if word in INSIDE:
        return False
    near = did_you_mean(word, (*FORMS, *INSIDE))
    return not near or any(f"`{form}`" in near for form in FORMS)
