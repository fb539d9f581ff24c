"""The lines of a plan in words: how each is written, and what may stand in one."""

from __future__ import annotations

from schedc.diagnostics import did_you_mean

FORMS: dict[str, str] = {
    "layers": "layers 61 dense 3 mtp 1 pad 3 at last",
    "layout": 'layout "Et*3|(tt|)*2m|L" dense 3',
    "costs": "costs dense 1 moe 1.5",
    "parameters": "parameters dense 200 MB moe 1.2 GB",
    "activations": "activations dense 300 MB",
    "memory": "memory 80 GB",
    "experts": "experts 256 top 8 groups 8 limit 4 shared 1 width 2048 hidden 7168",
    "topology": "topology nodes 4 x 8 rail 50 GB/s node 400 GB/s",
    "tokens": "tokens 4096 dtype bf16",
    "alltoall": "alltoall auto",
    "overlap": "overlap auto",
    "capacity": "capacity 1.25 drop probs",
    "hot": "hot 3 until imbalance < 1.2",
    "recompute": "recompute chunk 0 medium adaptive(2.0) by rank",
    "cell": "cell F & B { compute B.mlp.I F.mlp comm F.dispatch }",
}
"""One right line for each word that begins one."""

INSIDE = frozenset((
    "dense", "moe", "mtp", "embedding", "head", "pad", "last", "first", "auto", "off", "top", "groups", "limit",
    "shared", "width", "hidden", "nodes", "x", "rail", "node", "dtype", "bf16", "fp16", "fp32", "fp8", "flat",
    "hierarchical", "allgather", "drop", "probs", "position", "until", "imbalance", "all", "chunk", "adaptive", "by",
    "group", "bubbles", "none", "norm", "act", "light", "medium", "full",
))  # fmt: skip
"""The names that may stand in a line, and so begin a line of the text where a line of the plan goes on."""


def begins_nothing(word: str) -> bool:
    """Whether a name at the begin of a line of the text is neither part of a line of the plan nor nearly one."""
    if word in INSIDE:
        return False
    near = did_you_mean(word, (*FORMS, *INSIDE))
    return not near or any(f"`{form}`" in near for form in FORMS)
