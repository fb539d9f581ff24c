"""A loader of packed rows that are dealt to replicas by cost, and ordered inside the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from schedc.ir.arrays import Int64
from schedc.ir.program import Program
from schedc.step.costs.costs import Costs
from schedc_runtime.data.choices import NEXT, ProgramChoices, StepChoice
from schedc_runtime.data.dealt import Deal, deal, order_rows, pricer_of
from schedc_runtime.data.documents import next_tokens, packed_inputs
from schedc_runtime.data.lengths import Lengths
from schedc_runtime.data.windows import DataPlace, PackedRow, Window, Windows
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Mesh

Batch = tuple[Any, Tensor]
"""(inputs of the model, targets), each tensor [rows of a replica, tokens]: what `Pipeline.step` takes."""


class DocumentSource(Protocol):
    """The documents of a data set by number: [tokens] whole numbers each."""

    def __getitem__(self, document: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class DealtStep:
    """The rows of one step. place: where it stands. rows: all of them. following: the place behind it.

    orders: [replicas, microbatches] places of microbatches, by replica. deal: which replica has which rows.
    choice: which program runs the step; None where the pipeline has one.
    """

    place: DataPlace
    following: DataPlace
    rows: tuple[PackedRow, ...]
    deal: Deal
    orders: Int64
    choice: StepChoice | None = None

    def of(self, replica: int) -> list[PackedRow]:
        """The rows of a replica, microbatch by microbatch as the pipeline takes them."""
        numbers = self.deal.rows[replica, self.orders[replica]]
        return [self.rows[number] for number in numbers.ravel().tolist()]

    @property
    def documents(self) -> list[int]:
        """Numbers of all documents of the step, sorted. They are the same with any number of replicas."""
        return sorted(int(number) for row in self.rows for number in row.documents)


class RowLoader:
    """Gives batches for `Pipeline.step`, without end: an epoch follows the other.

        lengths = Lengths.open("lengths.bin", len(documents))
        loader = RowLoader(documents, lengths, windows, program, mesh=mesh, replica=pipe.replica)
        saved = Checkpoints("runs/7b", pipe, optimizer, data=loader)
        for step in range(saved.resume(), steps):
            loss = saved.train(*next(loader))

    Rows, deal and order of a step are found in a thread while the step before runs. All ranks of a pipeline have a
    loader each, which gives them the same batch. The state is a place in the data: a run may go on with another number
    of replicas or microbatches, and each step has the samples that it would have had.

    documents: of the data set, by number. lengths: theirs. windows: which rows make a step. program: of the pipeline.
    mesh: the processes of a run; by default one pipeline. replica: that of this process; None gives the rows of all,
    one replica behind the other, as a pipeline with ``in_process`` takes them. costs: of ops, by which microbatches are
    ordered. ordered: False leaves microbatches in the order of the deal. inputs: makes a model's inputs of tokens
    int64 and documents int32, [rows, tokens] each: by default `packed_inputs`, ``tokens`` and ``documents`` by name.

    others: further programs, as the pipeline has them. Each step then has a `choice` for `Pipeline.step`.
    tries: orders that are priced of the chosen program, by default `choices.NEXT`.
    """

    def __init__(
        self,
        documents: DocumentSource,
        lengths: Lengths,
        windows: Windows,
        program: Program,
        *,
        mesh: Mesh | None = None,
        replica: int | None = 0,
        costs: Costs | None = None,
        ordered: bool = True,
        inputs: Callable[[Tensor, Tensor], Any] = packed_inputs,
        others: Sequence[Program] = (),
        tries: int | None = None,
    ) -> None:
        mesh = mesh or Mesh(program.ranks)
        parts = mesh.replicas * program.microbatches
        if windows.rows % parts:
            raise RuntimeFault(
                f"steps of {windows.rows} rows for {mesh.replicas} replicas of {program.microbatches} microbatches",
                f"give a multiple of {parts} rows, or other numbers of replicas or microbatches",
            )
        if replica is not None and not 0 <= replica < mesh.replicas:
            raise RuntimeFault(f"replica {replica} of {mesh.replicas}", "pass replica=pipe.replica and the pipe's mesh")
        self._documents, self._lengths, self._windows, self._inputs = documents, lengths, windows, inputs
        self._mesh, self._microbatches, self._rows = mesh, program.microbatches, windows.rows // parts
        self._replicas = range(mesh.replicas) if replica is None else range(replica, replica + 1)
        if others and not ordered:
            raise RuntimeFault("ordered=False, and `others` to choose from", "leave one of the two out")
        if tries is not None and not others:
            raise RuntimeFault(f"tries={tries} without `others`, of which a program is chosen", "leave it out")
        self._choices = ProgramChoices.of([program, *others], costs or Costs()) if others else None
        self._pricer = pricer_of(program, costs) if ordered and not others else None
        self._tries = NEXT if tries is None else tries
        self._place = DataPlace(0, 0, 0)
        self._window: tuple[DataPlace, Window] | None = None
        self._thread = ThreadPoolExecutor(1, "rows of the next step")
        self._next: Future[tuple[DealtStep, Batch]] | None = None
        self.last: DealtStep | None = None
        """The rows of the batch that was given last."""

    @property
    def choice(self) -> StepChoice | None:
        """What runs the batch that was given last: ``pipe.step(*next(loader), choice=loader.choice)``."""
        return None if self.last is None else self.last.choice

    def __iter__(self) -> RowLoader:
        return self

    def __next__(self) -> Batch:
        due = self._next or self._thread.submit(self._made, self._place)
        self._next = None
        self.last, batch = due.result()
        self._place = self.last.following
        self._next = self._thread.submit(self._made, self._place)
        return batch

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """The place of the batch that comes next, and the facts that decide what lies there."""
        return {**self._facts(), **self._place._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place. Raises `RuntimeFault` for a state of other rows, windows, lengths or seed."""
        for name, own in self._facts().items():
            if state.get(name) != own:
                raise RuntimeFault(
                    f"the state is of data with {name} = {state.get(name)}, here it is {own}",
                    "give `Windows` and lengths of the run; numbers of replicas and microbatches may change",
                )
        place = DataPlace(*(state.get(name, -1) for name in DataPlace._fields))
        if not all(isinstance(number, int) and number >= 0 for number in place) or place.step >= self._windows.steps:
            raise RuntimeFault(f"the state has no place in the data: {place}", "give what `state_dict` returned")
        if self._next is not None:
            self._next.cancel()
        self._next, self._place, self.last = None, place, None

    def _facts(self) -> dict[str, Any]:
        windows = self._windows
        facts: dict[str, Any] = {"seed": windows.seed, "rows": windows.rows, "tokens": windows.tokens}
        facts |= {"steps": windows.steps, "documents": self._lengths.count}
        costs = windows.costs
        return facts | ({"costs": [costs.squared, costs.linear, costs.constant]} if windows.steps > 1 else {})

    def _made(self, place: DataPlace) -> tuple[DealtStep, Batch]:
        """The step at a place, with the batch of the replicas here. Runs in the thread."""
        step = self._step(place)
        rows = [row for replica in self._replicas for row in step.of(replica)]
        return step, self._batch(rows)

    def _step(self, place: DataPlace) -> DealtStep:
        begin = place._replace(step=0)
        if self._window is None or self._window[0] != begin:
            window = self._windows.at(begin, self._lengths)
            if window is None:
                return self._step(self._new_epoch(place))
            self._window = begin, window
        window = self._window[1]
        numbers = window.cut[place.step]
        mesh = self._mesh
        dealt = deal(window.costs[numbers], self._microbatches, mesh.replicas, mesh.sharing_replicas, self._rows)
        orders, choice = self._ordered(dealt)
        following = place._replace(step=place.step + 1)
        if following.step == self._windows.steps:
            following = DataPlace(place.epoch, place.document + window.documents, 0)
        return DealtStep(place, following, tuple(window.rows[number] for number in numbers), dealt, orders, choice)

    def _ordered(self, dealt: Deal) -> tuple[Int64, StepChoice | None]:
        """[replicas, microbatches] the orders of the replicas here, and which program runs them."""
        share = self._mesh.sharing_replicas
        orders = np.tile(np.arange(self._microbatches, dtype=np.int64), (self._mesh.replicas, 1))
        if self._choices is not None:
            groups = np.stack([dealt.group_costs(first) for first in range(0, self._mesh.replicas, share)])
            choice = self._choices.choose(groups, [replica // share for replica in self._replicas], self._tries)
            orders[self._replicas.start : self._replicas.stop] = choice.orders
            return orders, choice
        found: dict[int, Int64] = {}
        for replica in self._replicas if self._pricer is not None else ():
            group = replica // share
            if group not in found:
                assert self._pricer is not None
                found[group] = order_rows(dealt.group_costs(replica), self._pricer)
            orders[replica] = found[group]
        return orders, None

    def _new_epoch(self, place: DataPlace) -> DataPlace:
        if not place.document:
            raise RuntimeFault(
                f"{self._lengths.count} documents do not fill the {self._windows.rows * self._windows.steps} rows of"
                f" {self._windows.tokens} tokens of a window",
                "give more documents, fewer rows or fewer steps of a window",
            )
        return DataPlace(place.epoch + 1, 0, 0)

    def _batch(self, rows: Sequence[PackedRow]) -> Batch:
        shape = (len(rows), self._windows.tokens)
        tokens, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
        for place, row in enumerate(rows):
            ends = np.cumsum(row.lengths)
            for number, length, end in zip(row.documents.tolist(), row.lengths.tolist(), ends.tolist(), strict=True):
                tokens[place, end - length : end] = self._read(number, length)
            documents[place] = np.searchsorted(ends, np.arange(shape[1]), side="right")
        filled = torch.tensor([int(row.lengths.sum()) for row in rows])
        packed = torch.from_numpy(tokens), torch.from_numpy(documents)
        return self._inputs(*packed), next_tokens(*packed, filled)

    def _read(self, number: int, length: int) -> Any:
        """[length] the tokens of a document."""
        tokens = np.asarray(self._documents[number])
        if tokens.shape != (length,):
            raise RuntimeFault(
                f"document {number} has the shape {list(tokens.shape)}, {self._lengths.name} says {length} tokens",
                "write the lengths of this data set anew",
            )
        return tokens
