"""Runs that go on, in many layouts: the bits of a run that never stopped, and equal states by name in other layouts.

A chain trains in one layout, goes on from memory and from disk, and is loaded by a second layout.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import schedc
from schedc.ir.plan import Hot, Plan
from schedc_runtime import Checkpoints, Mesh, Pipeline
from schedc_runtime.checkpoint.committed import stored_in_boxes, with_aliases
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.placement import ExpertPlaces
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.saved.form import COMMIT, step_folder
from schedc_runtime.saved.read import open_step
from schedc_runtime.testing import CaseFailed, pool
from schedc_runtime.trainers.optimizer_state import OptimizerFacts
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.segmented_cases import small_moe

END, CUT = 5, 2
"""Updates of a whole run, and the update that is loaded from disk."""
ROUTED = ("experts", "hot", "moved")
"""Features whose models have experts."""
ACROSS = 1e-9
"""Bound of the loss's difference, one update behind a load in another layout."""


class Layout(NamedTuple):
    """What is trained, by which schedule, on how many ranks.

    ranks: of a pipeline. experts, data: replicas as in `Mesh`. together: whether one process has all ranks. size:
    blocks of the model, and microbatches of a step.
    """

    feature: str
    schedule: str
    ranks: int
    experts: int = 1
    data: int = 1
    together: bool = False
    size: int = 8

    @property
    def processes(self) -> int:
        return 1 if self.together else self.ranks * self.experts * self.data

    def __str__(self) -> str:
        replicas = f" x {self.experts}e x {self.data}d" if self.experts * self.data > 1 else ""
        return f"{self.feature} {self.schedule} P={self.ranks}{replicas}{' in one process' * self.together}"


class Rows:
    """Batches by number, other ones for each replica; all of them where one process has all ranks."""

    def __init__(self, pipe: Pipeline, together: bool) -> None:
        self.replicas = range(pipe.mesh.replicas) if together else [pipe.replica]
        self.microbatches = pipe.program.microbatches
        self.position = 0

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> Any:
        self.position += 1
        parts = [tokens(self.microbatches, seed=100 * replica + self.position) for replica in self.replicas]
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class ResumedRun:
    """A run with two groups of parameters, rates that change, and what its layout's feature asks for."""

    def __init__(self, root: Path, layout: Layout, durable: int = CUT) -> None:
        self.layout, self.lent = layout, 0
        self.pipe = pipeline(layout)
        groups: list[list[nn.Parameter]] = [[], []]
        for name, parameter in self.pipe.named_parameters():
            groups["norm" in name].append(parameter)
        options = [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0, "lr": 3e-3}]
        self.optimizer = torch.optim.AdamW(options, 1e-2, weight_decay=0.3, foreach=False)
        self.rates = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.rows = Rows(self.pipe, layout.together)
        self.saved = Checkpoints(
            root, self.pipe, self.optimizer, data=self.rows, rates=self.rates, durable=durable, keep=9
        )

    def update(self) -> float:
        """The loss of an update, which is made."""
        calls = 2 if self.layout.feature == "accumulated" else 1
        losses = [self.saved.train(*next(self.rows), accumulate=calls).item() for _ in range(calls)]
        layers = [layer for module in self.pipe.modules for _, layer in moe_layers(module)]
        self.lent += sum(layer.statistics.hot_experts for layer in layers)
        self.optimizer.step()
        self.rates.step()
        self.optimizer.zero_grad()
        if self.layout.feature in ROUTED:  # all ranks do so, one without experts too
            self.pipe.update_biases()
        if self.layout.feature == "moved":
            self.pipe.rebalance(self.optimizer, placements(self.pipe))
        return sum(losses) / calls

    def digests(self) -> dict[str, str]:
        """By name: the bits of all that this process holds, each rank's part by itself."""
        state: dict[str, Any] = {}
        for place in self.pipe.places:
            for stage in self.pipe.held(place):
                for name, value in stage.module.state_dict().items():
                    state[f"{place} {name}"] = value
                for name, parameter in stage.module.named_parameters():
                    for slot, value in self.optimizer.state.get(parameter, {}).items():
                        state[f"{place} {name} {slot}"] = value
        state["facts"] = repr([self.pipe.steps, self.rows.position, self.rates.state_dict()["_last_lr"]])
        state["groups"] = repr([{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups])
        state["hot"] = repr(self.pipe.balance_state())
        return {name: _digest(value) for name, value in state.items()}


def placements(pipe: Pipeline) -> dict[str, tuple[int, ...]]:
    """Where the experts of each layer lie behind so many steps: as many swaps of two of them."""
    names = [name for module in pipe.partition.modules for name, _ in moe_layers(module)]
    pairs = [(step % 8, (3 * step + 5) % 8) for step in range(pipe.steps)]
    return {name: ExpertPlaces.home(8).swapped(*pairs[number % 2 :]).order for number, name in enumerate(names)}


def pipeline(layout: Layout) -> Pipeline:
    """The pipeline of a layout, whose weights are the same on every rank."""
    program = schedc.compile(layout.schedule, P=layout.ranks, M=layout.size)
    mesh = Mesh(layout.ranks, layout.experts, layout.data, shard_dense=layout.feature == "sharded")
    plan = Plan(hot=Hot(2, 1.02)) if layout.feature == "hot" else None
    return Pipeline(
        model(layout.feature, layout.size), program, loss_fn=next_token_loss, mesh=mesh, plan=plan,
        in_process=layout.together, timeout=60, example=tokens(layout.size)[0],
    )  # fmt: skip


def model(feature: str, blocks: int) -> nn.Module:
    """A model of so many blocks."""
    if feature not in ROUTED:
        return small_gpt(blocks, dropout=0.1, tied=feature == "tied")
    routing = RouterConfig(experts=8, top=2, scores="sigmoid", biased=True, bias_rate=0.05, balance=1e-2)
    whole = small_moe(moe_blocks=blocks - 1, dense_blocks=1, routing=routing)
    for number, (_, layer) in enumerate(moe_layers(whole)):
        assert layer.router.bias is not None
        layer.router.bias.copy_(torch.randn(8, generator=torch.Generator().manual_seed(number)).double())
    return whole


def _digest(value: Any) -> str:
    value = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(value, Tensor):
        return hashlib.sha256(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return hashlib.sha256(str(value).encode()).hexdigest()


def whole_run(rank: int, world_size: int, layout: list[Any], root: str) -> dict[str, Any]:
    """Train to the end, and go on from memory and from disk: what differs here from the end, by source."""
    own, folder = Layout(*layout), Path(root)
    first = ResumedRun(folder / "run", own)
    first.saved.resume()
    losses = []
    for _ in range(END):
        losses.append(first.update())
        _wait_for(folder / "run", first.saved.step - 1)
    expected = first.digests()
    first.pipe.close()
    told: dict[str, Any] = {"loss": losses[CUT], "lent": first.lent}
    memory = ResumedRun(folder / "run", own)
    told["memory"] = _went_on(memory, END - 1, expected, losses)
    if rank == 0:
        shutil.copytree(step_folder(folder / "run", CUT), step_folder(folder / "disk", CUT))
    disk = ResumedRun(folder / "disk", own)
    told["disk"] = _went_on(disk, CUT, expected, losses)
    return told


def _wait_for(root: Path, step: int) -> None:
    """Wait until a state that is due is on disk: else the next ones might find no free image."""
    deadline = time.monotonic() + 30.0
    while step and step % CUT == 0 and not (step_folder(root, step) / COMMIT).is_file():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _went_on(run: ResumedRun, at: int, expected: Mapping[str, str], losses: list[float]) -> list[str]:
    first = run.saved.resume()
    wrong = [] if first == at else [f"it began at {first}, not at {at}"]
    again = [run.update() for _ in range(first, END)]
    wrong += [f"the loss of update {n}" for n, one, other in zip(range(first, END), again, losses[first:], strict=True)
              if one != other]  # fmt: skip
    now = run.digests()
    wrong += sorted(name for name in {*now, *expected} if now.get(name) != expected.get(name))
    run.saved.close()
    run.pipe.close()
    return wrong


def loaded_run(rank: int, world_size: int, layout: list[Any], source: str, root: str) -> float:
    """Load the state of another layout, keep it at once as step 0 of a run of its own, and train an update.

    Returns the loss of the update.
    """
    folder = Path(root)
    if rank == 0:
        shutil.copytree(step_folder(Path(source), CUT), step_folder(folder / "across", CUT))
    run = ResumedRun(folder / "across", Layout(*layout))
    assert run.saved.resume() == CUT
    states = {"data": run.rows, "rates": run.rates}
    again = Checkpoints(folder / "again", run.pipe, run.optimizer, durable=CUT, **states)
    assert again.resume() == 0
    again.close()
    loss = run.update()
    run.saved.close()
    run.pipe.close()
    return loss


def different(one: Path, other: Path) -> list[str]:
    """Names of the model's and optimizer's tensors that are not the same bits in two steps."""
    steps = [open_step(folder) for folder in (one, other)]
    facts = [[dict(manifest.facts) for manifest in step.manifests] for step in steps]
    tensors = [with_aliases(stored_in_boxes(step.tensors), (each["aliases"] for each in own))
               for step, own in zip(steps, facts, strict=True)]  # fmt: skip
    names = {name for each in tensors for name in each if not name.startswith("rank ")}
    wrong = [name for name in names if not all(name in each for each in tensors) or not _same(name, *tensors)]
    calls = [{each["steps"] for each in own} for own in facts]
    optimizers = [OptimizerFacts.together(OptimizerFacts(*each["optimizer"]) for each in own) for own in facts]
    options = [{name: each.options[group] for name, group in each.group.items()} for each in optimizers]
    return sorted(wrong) + ["steps"] * (calls[0] != calls[1]) + ["options"] * (options[0] != options[1])


def _same(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    values = []
    for each in (one[name], other[name]):
        value = torch.empty(each.shape, dtype=each.dtype)
        each.read(value)
        values.append(value.contiguous().view(-1).view(torch.uint8))
    return torch.equal(*values)


def layouts() -> dict[str, list[Layout]]:
    """By feature: four schedules at P = 4, 2 and 1, with replicas where the feature needs them.

    ``dualpipe`` needs two ranks, and its two copies of a stage cannot be sharded.
    """
    replicas = {
        "experts": {4: (1, 1), 2: (2, 1), 1: (2, 2)},
        "hot": {4: (2, 1), 2: (2, 1), 1: (2, 2)},
        "moved": {4: (2, 1), 2: (2, 1), 1: (2, 2)},
        "sharded": {4: (1, 2), 2: (1, 2), 1: (1, 4)},
    }  # fmt: skip
    every: dict[str, list[Layout]] = {}
    for feature in ("dropout", "tied", "accumulated", *replicas):
        for ranks, schedule in product((4, 2, 1), ("1f1b", "zbv", "dualpipe", "dualpipev")):
            experts, data = replicas.get(feature, {}).get(ranks, (1, 1))
            if schedule != "dualpipe" or (ranks > 1 and feature != "sharded"):
                every.setdefault(feature, []).append(Layout(feature, schedule, ranks, experts, data))
    return every


def chain(layout: Layout, other: Layout, folder: Path) -> Iterator[tuple[str, str, float]]:
    """Each source of a state with what is wrong, or "", and the loss's difference one update behind ``other``."""
    whole = pool(layout.processes).run(f"{__name__}:whole_run", timeout=240, layout=list(layout), root=str(folder))
    for source in ("memory", "disk"):
        wrong = [f"rank {rank}: {each}" for rank, told in enumerate(whole) for each in told[source]]
        if layout.feature == "hot" and not sum(told["lent"] for told in whole):
            wrong.append("no expert was lent")
        yield source, ", ".join(wrong[:5]), 0.0
    where = {"layout": list(other), "source": str(folder / "run"), "root": str(folder)}
    losses = pool(other.processes).run(f"{__name__}:loaded_run", timeout=240, **where)
    wrong = different(step_folder(folder / "run", CUT), step_folder(folder / "again", 0))
    far = 0.0
    if (layout.experts, layout.data) == (other.experts, other.data):  # they have trained on the same rows
        far = abs(losses[0] - whole[0]["loss"])
        wrong += [f"the loss differs by {far}"] * (far > ACROSS)
    yield "another layout", ", ".join(wrong[:5]), far


def chains() -> list[tuple[Layout, Layout]]:
    """Each layout with the one that loads its state: another one of the same feature, with other ranks."""
    pairs = []
    for listed in layouts().values():
        for number, layout in enumerate(listed):
            rest = [*listed[number + 2 :], *listed[:number]]
            pairs.append((layout, next(each for each in rest if each.ranks != layout.ranks)))
    return pairs


def resume(cases: int | None = None, record: str | None = None) -> dict[str, Any]:
    """All chains; by feature, schedule, number of ranks and source how many went on.

    across: largest difference of the loss, an update behind a load in another layout. cases: of three cases that a
    chain has; by default of all chains. record: file of finished chains, which are not run again.
    """
    every = chains()
    wanted = len(every) if cases is None else max(1, cases // 3)
    done: dict[str, list[Any]] = {}
    if record is not None and Path(record).is_file():
        done = json.loads(Path(record).read_text(encoding="utf-8"))
    for number in range(wanted):
        layout, other = every[number * len(every) // wanted]
        name = f"{layout} -> {other}"
        if name not in done:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                try:
                    done[name] = [[list(layout), *outcome] for outcome in chain(layout, other, Path(folder))]
                except CaseFailed as error:
                    done[name] = [[list(layout), "a rank", str(error)[-1500:], 0.0]]
            if record is not None:
                Path(record).write_text(json.dumps(done), encoding="utf-8")
    outcomes = [(name, *each) for name, own in done.items() for each in own]
    counts, failures = Counter[str](), list[str]()
    for name, (feature, schedule, ranks, *_), source, why, _ in outcomes:
        counts.update([] if why else [feature, schedule, f"P={ranks}", source])
        failures += [f"{name}, {source}: {why}"] if why else []
    told = {"cases": len(outcomes), "failed": len(failures), "went_on": dict(counts)}
    return {**told, "across": max((each[-1] for each in outcomes), default=0.0), "failures": failures[:50]}
