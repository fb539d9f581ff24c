"""Nodes are lost in a run whose states are copied to neighbours: each must come back with the bits it had.

Four nodes of two ranks are folders of this machine. Ranks are processes without torch. They train a state of hashes and
meet through the parent. Meeting, keepers, sockets and the rule of the safe step are those of `Checkpoints`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from schedc.compiler import compile as compile_schedule
from schedc_runtime.keeper.backed import HELD, UNDER_WAY, BackedImages, free_image
from schedc_runtime.keeper.images import TENSORS, Image
from schedc_runtime.keeper.places import Places
from schedc_runtime.keeper.start import KeeperMeeting
from schedc_runtime.saved.safetensors import safetensors_header
from schedc_runtime.trainers.brought_back import bring_back

NODES, EACH = 4, 2
WORLD = NODES * EACH
_BLOCKS = 1024
"""Hashes of 32 bytes in a tensor."""
_SECONDS = 60.0
"""Seconds in which any part of a case must be over."""


PROGRAM = compile_schedule("1f1b", P=2, M=2)


def value(name: str, step: int) -> bytes:
    """What a tensor holds after ``step`` steps: each follows from the one before."""
    state = name.encode()
    for number in range(step):
        state = sha256(state + number.to_bytes(4, "little")).digest()
    return sha256(state).digest() * _BLOCKS


def tensors_of(rank: int) -> dict[str, str]:
    """By name in the model, the key in the file of ``rank``. A rank of another node has the second tensor, too."""
    return {f"model.own.{rank}": "own", f"model.twin.{rank % EACH}.{rank // EACH % 2}": "twin"}


def safetensors_of(rank: int, step: int) -> bytes:
    """The file of ``rank`` after ``step`` steps."""
    header = safetensors_header((key, "U8", (32 * _BLOCKS,)) for key in tensors_of(rank).values())
    return header + b"".join(value(name, step) for name in tensors_of(rank))


class Control:
    """What ranks need of `ControlPlane`, through the parent."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.process, self._pipe = rank, pipe
        self.names = [f"rank {each}" for each in range(WORLD)]
        self.name = self.names[rank]
        self.presence = SimpleNamespace(progress=SimpleNamespace(descriptor=-1))

    def gather(self, what: str, mine: Any) -> list[Any]:
        self._pipe.send_bytes(json.dumps([what, mine]).encode())
        told: list[Any] = json.loads(self._pipe.recv_bytes())
        return told


class Writer:
    """The two images of a rank."""

    def __init__(self, places: Places, rank: int) -> None:
        self._rank, self._paths = rank, places.image_paths(rank)
        size = TENSORS + len(safetensors_of(rank, 0)) + (1 << 14)
        kept = [Image.opened(path) for path in self._paths]
        self.images = [Image.made(path, size) if image is None else image
                       for path, image in zip(self._paths, kept, strict=True)]  # fmt: skip

    def room(self, number: int, size: int) -> Image:
        if self.images[number].size < size:
            self.images[number].close()
            self.images[number] = Image.made(self._paths[number], size)
        return self.images[number]

    def steps(self) -> list[int | None]:
        return [None if (header := image.header()) is None else header.step for image in self.images]

    def write(self, number: int, step: int, facts: dict[str, Any]) -> None:
        image, content = self.images[number], safetensors_of(self._rank, step)
        image.clear()
        for begin in range(0, len(content), 1 << 14):
            image.write(content[begin : begin + (1 << 14)], TENSORS + begin)
        shape = [32 * _BLOCKS]
        tensors = {name: {"dtype": "U8", "shape": shape, "boxes": [{"key": key, "offset": [0], "size": shape}]}
                   for name, key in tensors_of(self._rank).items()}  # fmt: skip
        text = json.dumps({**facts, "facts": {}, "tensors": tensors}).encode()
        image.finish(step + 1, step, False, len(content), text)


def be_rank(rank: int, pipe: Connection, root: Path, memory: Path) -> None:
    """Train for ever, from the newest state on. The parent judges the state there."""
    control: Any = Control(rank, pipe)
    meeting = KeeperMeeting(control, root, memory, PROGRAM, 2, replicas=1)
    writer: Any = Writer(meeting.places, rank)
    meeting.start(writer.images[0].size)
    brought = bring_back(control, meeting, writer)
    common = set.intersection(*(set(steps) for steps in control.gather("steps", writer.steps()))) - {None}
    step = max(common, default=0)
    right = not common
    for image in writer.images:
        header = image.header()
        if header is not None and header.step == step:
            right = image.read(TENSORS, header.tensors) == safetensors_of(rank, step) and not header.copy
        elif header is not None and header.step > step:
            image.clear()
    control.gather("resumed", [step, right, brought])
    meeting.tidy(step)
    control.gather("tidied", None)
    meeting.open()
    backed = BackedImages(meeting.places, writer.images, max(common, default=None))
    while True:
        backed.agreed(max(control.gather("step", [backed.lacks(), step])))
        if backed.under is None:
            if step not in writer.steps():
                safe = {} if backed.safe is None else {"safe": backed.safe}
                facts = {"attempt": meeting.attempt, "run": meeting.run_facts, "elsewhere": ["twin"], **safe}
                writer.write(free_image(writer.steps(), backed.safe), step, facts)
            backed.under = step
        time.sleep(0.002)
        step += 1


class Cluster:
    """The nodes, and the ranks of one attempt on them. base: folder for all of it."""

    def __init__(self, base: Path) -> None:
        self.root, self._base = base / "run", base
        self._made = 0
        self.memory = [self._new() for _ in range(NODES)]
        """[nodes] the folder of images."""
        self.pids: list[int] = []
        self._pipes: list[Connection] = []
        self.chosen: list[int] = []
        """The steps that ranks began to copy since they came back."""
        self.agreed = 0
        """Number of states that all neighbours have got since then."""
        self._under = True

    def _new(self) -> Path:
        self._made += 1
        folder = self._base / f"node-{self._made}"
        folder.mkdir()
        return folder

    def start(self) -> None:
        """Start all ranks: two on each node, in the order of nodes."""
        self.chosen, self.agreed, self._under = [], 0, True
        for rank in range(WORLD):
            here, there = Pipe()
            if (pid := os.fork()) == 0:
                status = 1
                try:
                    for pipe in [here, *self._pipes]:
                        pipe.close()
                    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
                    errors = os.open(self._base / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(errors, 2)
                    be_rank(rank, there, self.root, self.memory[rank // EACH])
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            there.close()
            self.pids.append(pid)
            self._pipes.append(here)

    def round(self, until: float, only: int = WORLD) -> tuple[str, list[Any]]:
        """Answer a gather of all ranks, or of the first ``only`` of them. Returns occasion and values."""
        told = []
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, until - time.monotonic())):
                raise TimeoutError("a rank does not come")
            told.append(json.loads(pipe.recv_bytes()))
        (what,), values = {each[0] for each in told}, [each[1] for each in told]
        if what == "step":
            lacks = [each[0] for each in values]
            self.agreed += self._under and max(lacks) == HELD
            self._under = max(lacks) == UNDER_WAY
            if not self._under:
                self.chosen.append(values[0][1])
                self._under = True
            values = lacks
        for pipe in self._pipes[:only]:
            pipe.send_bytes(json.dumps(values).encode())
        return what, values

    def lose(self, node: int, seconds: float) -> None:
        """End a node with all that it holds, and ``seconds`` later all other ranks. A new node takes its place."""
        watch = next(iter(self.memory[node].glob("schedc-*/keeper.json")))
        doomed = self.pids[node * EACH : (node + 1) * EACH]
        keeper = json.loads(watch.read_text())[0][2]
        for pid in [*doomed, keeper]:
            os.kill(pid, signal.SIGKILL)
        time.sleep(seconds)
        self.end()
        shutil.rmtree(self.memory[node])
        self.memory[node] = self._new()

    def end(self) -> None:
        """End all ranks."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()
        self.pids, self._pipes = [], []

    def close(self) -> None:
        """End ranks and keepers."""
        self.end()
        for path in self._base.glob("node-*/schedc-*/keeper.json"):
            with suppress(OSError, ValueError):
                os.kill(json.loads(path.read_text())[0][2], signal.SIGKILL)

    @property
    def errors(self) -> str:
        return (self._base / "errors").read_text()[-2000:]


def lost_nodes(cases: int, seed: int = 5) -> Iterator[tuple[int, int, str]]:
    """Lose a node ``cases`` times in one run. Yields snapshots lost, images brought back, and what is wrong."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        cluster = Cluster(Path(place))
        try:
            before: list[int] = []
            for case in range(cases + 1):
                cluster.start()
                until, what, told = time.monotonic() + _SECONDS, "", list[Any]()
                while what != "resumed":
                    what, told = cluster.round(until)
                step, brought = told[0][0], told[0][2]
                if case:
                    lost = sum(each > step for each in before)
                    wrong = [rank for rank, each in enumerate(told) if not each[1]]
                    why = f"ranks {wrong} have other bits at step {step}" if wrong else ""
                    why = why or ("" if lost <= 1 else f"{lost} snapshots are lost: {before[-4:]}, back at {step}")
                    yield lost, sum(len(line.split(":")[0].split(",")) for line in brought), why
                rounds = draw.randint(1, 12)
                while cluster.agreed < 2 or rounds > 0:
                    rounds -= 1
                    cluster.round(until)
                cluster.round(until, only=draw.randint(0, WORLD))
                time.sleep(draw.random() * 0.02)
                before = cluster.chosen
                if case < cases:
                    cluster.lose(draw.randrange(NODES), draw.random() * 0.05)
                    if draw.random() < 0.5:
                        draw.shuffle(cluster.memory)
        except Exception as error:
            raise RuntimeError(f"case {case}: {error}\n{cluster.errors}") from error
        finally:
            cluster.close()


def peers(cases: int = 200) -> dict[str, Any]:
    """The figures of the word ``peers``: lost nodes, jobs that lose a node, and the cost of keepers."""
    from support.peer_costs import keeper_cpu_per_copy

    nodes, cost = losses(cases), keeper_cpu_per_copy()
    from support.lost_jobs import COPIES, flaws  # loads torch, which processes of the cases above shall not have

    wrong = flaws()
    return {
        **nodes, "cases": cases + len(COPIES), "failed": nodes["failed"] + len(wrong),
        "jobs_equal": len(COPIES) - len(wrong), "keeper_cpu_per_copy": round(cost, 1),
        "failures": nodes["failures"] + wrong,
    }  # fmt: skip


def losses(cases: int) -> dict[str, Any]:
    """The figures of nodes that are lost in one run, so many times."""
    outcomes = list(lost_nodes(cases))
    failures = [why for *_, why in outcomes if why]
    return {
        "cases": cases,
        "failed": len(failures),
        "back": len(outcomes) - len(failures),
        "snapshots_lost_max": max(lost for lost, *_ in outcomes),
        "brought": sum(brought for _, brought, _ in outcomes),
        "snapshots_lost": sum(lost for lost, *_ in outcomes),
        "failures": failures,
    }


if __name__ == "__main__":
    print(json.dumps(losses(int(sys.argv[1]))))
