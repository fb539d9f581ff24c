"""Plans for the fuzzer: random lines for every word of a plan, mostly of right form, and mutated plans.

A word without a method here is written as its row in `schedc.syntax.plan_words` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from schedc.syntax.plan_words import PLAN_WORDS, PlanWord

_SCHEDULES = (
    "dualpipev(P = 2, M = 8)", "dualpipev(P = 2, M = 4)", "1f1b(P = 4, M = 4)", "zbh1(P = 2, M = 4)",
    "dualpipe(P = 2, M = 4)", "interleaved_1f1b(P = 2, M = 4, v = 2)", "zbv(P = 2, M = 4)", "gpipe", "dualpipev(P = 3)",
)  # fmt: skip
_ODD = ("0", "1.5", "-1", "99999999999", "2147483647", "x", "", "é", "3 3", "0.000001", "[0]", "KB", "all", "{", "}")
_ROLES = ("attention", "attn", "permute", "relay", "experts", "mlp", "relay_back", "shared", "post")
_EXCHANGES = ("routing", "dispatch", "combine", "hot")
_UNITS = ("", " GB", " MB", " KiB")
_ODD_UNITS = (" TB", " Gbit", " GB/s", " gb", "GB", "/s", " GB*s")
_LEVELS = ("none", "norm", "act", "light", "medium", "full", "layer")


class PlanWriter:
    """Writes one random plan; ``wild`` is how often it does something odd."""

    def __init__(self, draw: Random) -> None:
        self.draw, self.wild = draw, draw.choice((0.0, 0.01, 0.1))

    def pick(self, *choices: object) -> str:
        return str(self.draw.choice(_ODD if self.draw.random() < self.wild else choices))

    def some(self, *parts: str) -> str:
        return " ".join(part for part in parts if self.draw.random() < 0.5)

    def unit(self) -> str:
        return self.draw.choice(_ODD_UNITS if self.draw.random() < self.wild else _UNITS)

    def plan(self) -> str:
        rows = [row for row in PLAN_WORDS if row.word not in ("layers", "layout")]
        kinds = [self.recompute, *(getattr(self, row.word, partial(self.like, row)) for row in rows)]
        lines = [self.layers(), *(make() for make in self.draw.sample(kinds, self.draw.randint(1, len(kinds))))]
        if self.draw.random() < 0.5:
            self.draw.shuffle(lines)
        gap = self.draw.choice(("\n  ", "\n  ", "  "))
        return f"sched 1\nplan a = {self.pick(*_SCHEDULES)} {{{gap}{gap.join(lines)}\n}}\n"

    def layers(self) -> str:
        if self.draw.random() < 0.1:
            return f'layout "{self.pick("Et|tt|tt|tL", "E|t|t|L", "Ett|ttL", "tt|tt|tt|tt")}"'
        options = self.some(
            f"dense {self.pick(0, 1, 3)}", "mtp 1", f"pad {self.pick(1, 2)} at {self.pick('last', '[1]')}"
        )
        return f"layers {self.pick(4, 8, 9, 61)} {options}"

    def tied(self) -> str:
        return "tied embedding"

    def experts(self) -> str:
        more = self.some(
            f"groups {self.pick(2, 4, 8)} limit {self.pick(1, 2, 4)}", f"shared {self.pick(1, 2)}",
            f"width {self.pick(64, 2048)} hidden {self.pick(256, 7168)}",
        )  # fmt: skip
        return f"experts {self.pick(16, 64, 256, 65536)} top {self.pick(1, 2, 8)} {more}"

    def topology(self) -> str:
        links = self.some(f"rail {self.pick(50)}{self.pick(' GB/s', ' Gbit/s')}", f"node {self.pick(400)} GB/s")
        return f"topology nodes {self.pick(1, 2, 4, 8)} x {self.pick(1, 2, 8)} {links}"

    def tokens(self) -> str:
        return f"tokens {self.pick(1, 512, 4096)} {self.some('dtype ' + self.pick('bf16', 'fp8', 'fp32'))}"

    def alltoall(self) -> str:
        return f"alltoall {self.pick('flat', 'hierarchical', 'allgather', 'auto')}"

    def overlap(self) -> str:
        return f"overlap {self.pick('auto', 'auto', 'off')}"

    def cell(self) -> str:
        kind = f"F & {self.pick(*'BBBI')}"
        if self.draw.random() < 0.3:
            return f"cell {kind} auto"
        lanes = [f"compute {self.steps(_ROLES)}", f"comm {self.steps(_EXCHANGES)}"]
        return f"cell {kind} {{ {' '.join(self.draw.sample(lanes, self.draw.randint(1, 2)))} }}"

    def steps(self, roles: tuple[str, ...]) -> str:
        whole = roles is _ROLES
        names = [f"{half}.{role}" for half in "FB" for role in roles]
        names = [f"{name}{part}" for name in names for part in ((".I", ".W") if whole and name[0] == "B" else ("",))]
        return " ".join(self.pick(name) for name in self.draw.sample(names, self.draw.randint(1, 6)))

    def capacity(self) -> str:
        return f"capacity {self.pick('1.25', 1, '0.01')} {self.some('drop ' + self.pick('probs', 'position'))}"

    def hot(self) -> str:
        until = self.some("until imbalance < " + self.pick("1.2", 1))
        return f"hot {self.pick('auto', 1, 2, 9)} {self.some('by microbatch')} {until}"

    def recompute(self) -> str:
        where = self.pick("", "all", "chunk 0", "chunk 1", "stage 1", "stage [0, 1]", "stage 0")
        how = self.some(f"adaptive({self.pick('2.0', 3)}) {self.some('by ' + self.pick('rank', 'group'))}")
        level = self.pick(*_LEVELS, "auto", "full 1 act 1", "act 2 none 1 medium 3", "none 1")
        return f"recompute {where} {level} {how} {self.some('in bubbles')}"

    def parallel(self) -> str:
        tp = f"tp {self.pick(1, 2, 8)} {self.some('of ' + self.pick('attention'))}"
        sizes = self.some(f"devices {self.pick(8, 16, 6144)}", f"node {self.pick(1, 8)}", f"cp {self.pick(1, 2)}")
        return f"parallel {tp} {sizes} ep {self.pick(1, 2, 8)} dp {self.pick(1, 2, 8)} zero {self.pick(0, 1, 3)}"

    def batch(self) -> str:
        by = self.some(f"by {self.pick(1, 2)}")
        return f"batch {self.pick(4, 8, 64)} x {self.pick(512, 8192)} {by}"

    def memory(self) -> str:
        return f"memory {self.pick(1, 40, '0.5', 100000)}{self.unit()}"

    def costs(self) -> str:
        return self.table("costs")

    def parameters(self) -> str:
        return self.table("parameters")

    def activations(self) -> str:
        return self.table("activations")

    def table(self, word: str) -> str:
        entries = (f"{kind} {self.pick(1, 30)}{self.unit()}" for kind in ("dense", "moe", "head"))
        return f"{word} {self.some(*entries) or 'moe 3'}"

    def like(self, row: PlanWord) -> str:
        """A line as the form of its row, with other numbers and other names of the row: for words without a method."""
        word, *parts = row.form.split()
        return " ".join([word, *(self.other(part, row) for part in parts)])

    def other(self, part: str, row: PlanWord) -> str:
        if part.replace(".", "", 1).isdigit():
            return self.pick(part, 0, 1, "1.25", 8)
        return self.pick(part, *row.names) if part in row.names else self.pick(part)


def plan(draw: Random, mutate: Callable[[Random, str], str]) -> str:
    """A random plan; every third one mutated."""
    text = PlanWriter(draw).plan()
    return mutate(draw, text) if draw.random() < 0.3 else text
