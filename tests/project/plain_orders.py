"""The published rules of the library's orders, in plain Python: the cells of one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


def plain_1f1b(P: int, M: int, r: int) -> list[str]:
    ahead = min(P - 1 - r, M)
    cells = [f"{r}F{i}" for i in range(ahead)]
    for i in range(M - ahead):
        cells += [f"{r}F{ahead + i}", f"{r}B{i}"]
    return cells + [f"{r}B{i}" for i in range(M - ahead, M)]


def plain_gpipe(P: int, M: int, r: int) -> list[str]:
    return [f"{r}{kind}{i}" for kind in "FB" for i in range(M)]


def plain_zbh1(P: int, M: int, r: int) -> list[str]:
    ahead = min(P - 1 - r, M)
    cells = [f"{r}F{i}" for i in range(ahead)]
    for i in range(M):
        cells += [f"{r}F{ahead + i}"] if i < M - ahead else []
        cells += [f"{r}I{i}"]
        cells += [f"{r}W{i - r}"] if i >= r else []
    return cells + [f"{r}W{i}" for i in range(max(0, M - r), M)]


def plain_eager_1f1b(P: int, M: int, r: int) -> list[str]:
    ahead = min(2 * (P - r) - 1, M)
    cells = [f"{r}F{i}" for i in range(ahead)]
    for i in range(M - ahead):
        cells += [f"{r}B{i}", f"{r}F{ahead + i}"]
    return cells + [f"{r}B{i}" for i in range(M - ahead, M)]


def plain_zbh2(P: int, M: int, r: int) -> list[str]:
    """A counter of each kind, and W as late as 2r allows: no phases."""
    cells, forwards = [], 0
    for i in range(M):
        while forwards < min(2 * (P - 1 - r) + 1 + i, M):
            cells.append(f"{r}F{forwards}")
            forwards += 1
        cells += [f"{r}I{i}"] + ([f"{r}W{i - 2 * r}"] if i >= 2 * r else [])
    return cells + [f"{r}W{i}" for i in range(max(0, M - 2 * r), M)]


def plain_1f1b_overlap(P: int, M: int, r: int) -> list[str]:
    ahead = min(2 * (P - 1 - r) + 1, M)
    pairs = [f"{r}F{ahead + i}&{r}B{i}" for i in range(M - ahead)]
    return [f"{r}F{i}" for i in range(ahead)] + pairs + [f"{r}B{i}" for i in range(M - ahead, M)]


def plain_zbh1_late(P: int, M: int, r: int) -> list[str]:
    """Backward i of rank r > 0 is split if it is one of the first r, the last beside a forward, or after those."""
    ahead = min(P - 1 - r, M)
    cells, pending = [f"{r}F{i}" for i in range(ahead)], deque[str]()
    for i in range(M):
        cells += [f"{r}F{ahead + i}"] if i < M - ahead else []
        if r == 0 or r <= i < M - ahead - 1:
            cells.append(f"{r}B{i}")
            continue
        cells.append(f"{r}I{i}")
        pending.append(f"{r}W{i}")
        cells += [pending.popleft()] if i >= r else []
    return cells + list(pending)


def plain_chimera(P: int, M: int, r: int) -> list[str]:
    """When each op starts if a backward takes as long as a forward: both directions, unit by unit."""
    at: dict[int, str] = {}
    for pipe, stage in enumerate((r, P - 1 - r)):
        for i in range(M // 2):
            begin = i // (P // 2) * 2 * P + 2 * (i % (P // 2))
            at[begin + stage] = f"{stage}F{pipe * M // 2 + i}"
            at[begin + 2 * P - 1 - stage] = f"{stage}B{pipe * M // 2 + i}"
    assert len(at) == 2 * M
    return [at[slot] for slot in sorted(at)]


def plain_hanayo(P: int, M: int, w: int, r: int) -> list[str]:
    """Waves: a stage every other slot, there and back again through all of them, unit after unit of P microbatches."""
    stages = [s for s in range(2 * P * w) if r == (s % P if s // P % 2 == 0 else P - 1 - s % P)]
    at: dict[int, str] = {}
    for m in range(M):
        unit, i = divmod(m, P)
        for s in stages:
            at[unit * 4 * P * w + 2 * i + s] = f"{s}F{m}"
            at[unit * 4 * P * w + 2 * i + 4 * P * w - 1 - s] = f"{s}B{m}"
    assert len(at) == 4 * w * M
    return [at[slot] for slot in sorted(at)]


class Steps:
    """DualPipe as its authors write it: counters and a queue of weight gradients, step by step."""

    def __init__(self, stages: tuple[int, int], first: tuple[int, int], swapped: bool) -> None:
        self.stages, self.swapped = stages, swapped
        self.next = {(kind, chunk): first[chunk] for kind in "FB" for chunk in (0, 1)}
        self.weights: deque[str] = deque()
        self.cells: list[str] = []

    def op(self, kind: str, phase: int) -> str:
        chunk = phase ^ self.swapped
        counter = ("F" if kind == "F" else "B", chunk)
        microbatch = self.next[counter]
        self.next[counter] += 1
        if kind == "I":
            self.weights.append(f"{self.stages[chunk]}W{microbatch}")
        return f"{self.stages[chunk]}{kind}{microbatch}"

    def do(self, *ops: str) -> None:
        """``F0``: an op of a phase; ``W``: the oldest weight gradient; ``F0&B1``: a pair."""
        for op in ops:
            done = [self.weights.popleft() if part == "W" else self.op(part[0], int(part[1])) for part in op.split("&")]
            self.cells.append("&".join(done))


def eight_steps(steps: Steps, half: int, near: int, pairs: int, unpaired: bool) -> list[str]:
    """The step function of DeepSeek's code: ``half`` ranks (half of them for DualPipe), at distance ``near``."""
    ahead = half - near - 1
    for _ in range(2 * ahead):
        steps.do("F0")
    for _ in range(near + 1):
        steps.do("F0", "F1")
    for _ in range(ahead):
        steps.do("I1", "W", "F1")
    for i in range(pairs):
        steps.do(*(("F0", "B1") if i == 0 and unpaired else ("F0&B1",)), "F1&B0")
    for _ in range(ahead):
        steps.do("B1", "F1&B0")
    split = False
    for i in range(near + 1):
        split = split or (i == (near + 1) // 2 and near % 2 == 1)
        steps.do("I1" if split else "B1")
        split = split or (i == (near + 1) // 2 and near % 2 == 0)
        steps.do("I0" if split else "B0")
    for _ in range(ahead):
        steps.do("W", "I0")
    for _ in range(near + 1):
        steps.do("W")
    return steps.cells


def plain_dualpipe(P: int, M: int, r: int) -> list[str]:
    near = min(r, P - 1 - r)
    steps = Steps((r, P - 1 - r), (0, M // 2), swapped=r >= P // 2)
    return eight_steps(steps, P // 2, near, M // 2 - P + near + 1, unpaired=near == P // 2 - 1)


def plain_dualpipev_nosplit(P: int, M: int, r: int) -> list[str]:
    """The steps of DualPipeV, where the last backwards are whole: from the first backward after the last pair on."""
    cells = plain_dualpipev(P, M, r)
    last_pair = max(i for i, cell in enumerate(cells) if "&" in cell)
    return cells[: last_pair + 1] + [c.replace("I", "B") for c in cells[last_pair + 1 :] if "W" not in c]


def plain_dualpipev(P: int, M: int, r: int) -> list[str]:
    steps = Steps((r, 2 * P - 1 - r), (0, 0), swapped=False)
    return eight_steps(steps, P, r, M - 2 * P + r + 1, unpaired=r == P - 1)


PLAIN: dict[str, Callable[[int, int, int], list[str]]] = {
    "eager_1f1b": plain_eager_1f1b,
    "zbh2": plain_zbh2,
    "1f1b_overlap": plain_1f1b_overlap,
    "zbh1_late": plain_zbh1_late,
    "chimera": plain_chimera,
    "dualpipev_nosplit": plain_dualpipev_nosplit,
    "gpipe": plain_gpipe,
    "1f1b": plain_1f1b,
    "zbh1": plain_zbh1,
    "dualpipe": plain_dualpipe,
    "dualpipev": plain_dualpipev,
}


def plain_seq1f1b(P: int, M: int, k: int, r: int) -> list[str]:
    ahead = min(P - r - 2 + k, M * k)
    backwards = [f"{r}B{m * k + k - 1 - j}" for m in range(M) for j in range(k)]
    cells = [f"{r}F{i}" for i in range(ahead)]
    for i in range(M * k - ahead):
        cells += [f"{r}F{ahead + i}", backwards[i]]
    return cells + backwards[M * k - ahead :]


def plain_interleaved_overlap(P: int, M: int, v: int, r: int) -> list[str]:
    """Megatron's tables of the virtual index, in rounds of P microbatches, and one forward more ahead."""
    table = [(c, first + i) for first in range(0, M, P) for c in range(v) for i in range(P)]
    forwards = [f"{c * P + r}F{m}" for c, m in table]
    backwards = [f"{(v - 1 - c) * P + r}B{m}" for c, m in table]
    ahead = min(2 * (P - 1 - r) + (v - 1) * P + 1, M * v)
    pairs = [f"{f}&{b}" for f, b in zip(forwards[ahead:], backwards, strict=False)]
    return forwards[:ahead] + pairs + backwards[len(pairs) :]
