"""The stage of each unit and parameter of a cut model, also of those that the first example does not use.

    example: task "a"    embed  blocks.0 | blocks.1  heads.a            heads.b lies beside heads.a
    a batch: task "b"    embed  blocks.0 | blocks.1  heads.b

What the example does not use lies in the stage of its neighbour, which is registered beside it. A later batch may call
other units, as long as it calls them in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.split import Entries


class Homes:
    """Where stages begin in recordings that call other units than the first.

    entered: [entries] names of the units in the first one. cuts: [stages - 1] entries before each cut.
    """

    def __init__(self, model: nn.Module, entered: Sequence[str], cuts: Sequence[int]) -> None:
        self._model, self._entered, self._cuts = model, tuple(entered), tuple(cuts)
        self._stages: dict[str, list[int]] = {}
        for position, name in enumerate(entered):
            self._stages.setdefault(name, []).append(sum(position >= cut for cut in cuts))
        self._held: list[frozenset[str]] = [frozenset()] * (len(cuts) + 1)

    def hold(self, modules: Iterable[nn.Module]) -> None:
        """Note the parameters of the stage modules [stages]."""
        self._held = [frozenset(n for n, _ in m.named_parameters(remove_duplicate=False)) for m in modules]

    def lacks(self, stage: int, path: str) -> bool:
        """Whether a stage does not hold a parameter, or all parameters of a module."""
        named = self._model.get_submodule(path).named_parameters() if path not in self._held[stage] else ()
        return any(f"{path}.{name}" not in self._held[stage] for name, _ in named) if path else False

    def begins(self, entries: Entries) -> list[int]:
        """[stages - 1] position in a recording at which each stage but the first begins.

        Raises `PartitionError` for a unit that is called behind one of a later stage.
        """
        if entries.names == self._entered:
            return entries.stages(self._cuts)
        begins: list[int] = []
        latest = ""
        for name, start in zip(entries.names, entries.starts, strict=True):
            homes = self._of(name) or [len(begins)]
            home = next((stage for stage in homes if stage >= len(begins)), None)
            if home is None:
                raise PartitionError(
                    f"{type(self._model).__name__} calls `{name}`, which stage {homes[-1]} holds, behind `{latest}` of"
                    f" stage {len(begins)}",
                    "let every batch and both modes call units in the order of the stages. A unit that the example does"
                    " not call lies in the stage of the one registered before it",
                )
            begins += [start] * (home - len(begins))
            latest = name
        return begins + [entries.end] * (len(self._cuts) - len(begins))

    def _of(self, unit: str) -> list[int]:
        """The stages of a unit, ascending; none for one without parameters that the example does not call."""
        if unit in self._stages:
            return self._stages[unit]
        if next(self._model.get_submodule(unit).parameters(), None) is None:
            return []
        return [stage for stage in range(len(self._held)) if not self.lacks(stage, unit)]
