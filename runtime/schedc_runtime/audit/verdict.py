"""Decides which rank or link is at fault where digests differ, and in which way.

input or weights changed since they came     memory       the rank that holds them
sent and received bits differ                link         from one rank to another
own repetition differs from the first        transient    the suspect; the repeater likewise
own repetitions agree, a third rank tells    persistent   the one of the two that differs from it
own repetitions agree, nobody else           either       one of the two
neither repeats itself                       unstable     nobody: an operation that gives other bits at each run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from schedc_runtime.audit.capture import INPUT, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT
from schedc_runtime.audit.digests import Digests, unlike


class VerdictKind(StrEnum):
    """The first four name a rank or a link."""

    TRANSIENT = "transient"
    PERSISTENT = "persistent"
    MEMORY = "memory"
    LINK = "link"
    EITHER = "one of two"
    UNSTABLE = "unstable"


NAMING = (VerdictKind.TRANSIENT, VerdictKind.PERSISTENT, VerdictKind.MEMORY, VerdictKind.LINK)
"""The kinds that name a single rank, or a single link."""


@dataclass(frozen=True)
class RankDigests:
    """Digests of a rank in a case.

    given: of inputs and output gradients, when they came. held: of the same in memory now.
    results: [runs] of outputs and gradients. The suspect's first run is that in the step.
    weights: of its weights now. before: of the suspect's weights before the step.
    borrowed: whether the weights came from another rank.
    """

    given: Digests
    results: Sequence[Digests]
    weights: Digests
    held: Digests = field(default_factory=dict)
    before: Digests = field(default_factory=dict)
    borrowed: bool = False


@dataclass(frozen=True)
class AuditVerdict:
    """kind: of the fault. ranks: the names of who is accused: one, the two ends of a link, or the two that differ.

    values: names of the values that differ.
    """

    kind: VerdictKind
    ranks: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def names_one(self) -> bool:
        """Whether a single rank is named, or a single link."""
        return self.kind in NAMING


def link_verdict(ends: Mapping[str, tuple[str, str]], made: Digests, got: Digests) -> AuditVerdict | None:
    """A link that has changed a message. ends: by value, the names of its sender and receiver.

    made, got: digests of messages, by value, where they were sent and where they arrived.
    """
    for name in (INPUT, OUTPUT_GRADIENT, OUTPUT, INPUT_GRADIENT):
        if name in made and name in got and made[name] != got[name]:
            return AuditVerdict(VerdictKind.LINK, ends[name], (name,))
    return None


def judge(
    names: Sequence[str], first: RankDigests, second: RankDigests, third: RankDigests | None = None
) -> AuditVerdict | None:
    """The verdict on a suspect and a second rank that differ; None where only a third rank can tell.

    names: of the ranks. first: of the suspect, with three runs. second: with two runs. third: with one run; None
    before a third rank was asked.
    """
    suspect, other = names[0], names[1]
    told = first.results[0]
    values = tuple(unlike(told, second.results[0]))
    if changed := unlike(first.given, first.held):
        return AuditVerdict(VerdictKind.MEMORY, (suspect,), tuple(changed))
    if changed := unlike(first.given, second.given):
        return AuditVerdict(VerdictKind.LINK, (suspect, other), tuple(changed))
    if second.borrowed and (changed := unlike(first.before, second.weights)):
        return AuditVerdict(VerdictKind.LINK, (suspect, other), tuple(changed))
    if changed := unlike(first.before, first.weights):
        return AuditVerdict(VerdictKind.MEMORY, (suspect,), tuple(changed))
    steady, other_steady = not _changes(told, first.results), not _changes(told, second.results)
    if _changes(told, first.results[1:]) and not other_steady:
        return AuditVerdict(VerdictKind.UNSTABLE, (), values)
    if not steady:
        return AuditVerdict(VerdictKind.TRANSIENT, (suspect,), values)
    if not other_steady:
        return AuditVerdict(VerdictKind.TRANSIENT, (other,), values)
    return _with_third(names, first, second, third)


def _with_third(
    names: Sequence[str], first: RankDigests, second: RankDigests, third: RankDigests | None
) -> AuditVerdict | None:
    """The verdict on two ranks that both repeat themselves."""
    told, differ = first.results[0], unlike(first.weights, second.weights)
    if third is None:
        return None
    values = tuple(differ) or tuple(unlike(told, second.results[0]))
    kind = VerdictKind.MEMORY if differ else VerdictKind.PERSISTENT
    if not third.results or (differ and third.borrowed):
        return AuditVerdict(VerdictKind.EITHER, tuple(names[:2]), values)
    as_first, as_second = (
        not unlike(each.weights, third.weights) if differ else not unlike(each.results[0], third.results[0], told)
        for each in (first, second)
    )
    if as_first == as_second:
        return AuditVerdict(VerdictKind.EITHER, tuple(names[:2]), values)
    return AuditVerdict(kind, (names[1] if as_first else names[0],), values)


def _changes(told: Digests, runs: Sequence[Digests]) -> bool:
    """Whether any run differs from the first in a value of ``told``."""
    return any(unlike(runs[0], run, told) for run in runs[1:])
