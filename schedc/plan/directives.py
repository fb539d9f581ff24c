"""The directives of a plan while they are read: values so far, requests, places, findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from schedc.diagnostics import Diagnostic, Label, did_you_mean
from schedc.plan.values import Attachments, Recompute
from schedc.source import Span
from schedc.syntax.plan import PlanTree, Word


@dataclass(frozen=True)
class RecomputeRequest:
    """A ``recompute`` line. scope: ``all``, ``chunk`` or ``stage``; numbers: which ones."""

    scope: str
    numbers: tuple[int, ...]
    recompute: Recompute
    span: Span


@dataclass
class Directives:
    """What the directives of a plan say, while it is read.

    plan: without `recompute`, which is in ``requests`` until the stages are known. spans: of lines, by their word.
    """

    tree: PlanTree
    plan: Attachments = field(default_factory=Attachments)
    requests: list[RecomputeRequest] = field(default_factory=list)
    spans: dict[str, Span] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)

    def fault(self, code: str, message: str, span: Span, help: str = "", notes: tuple[str, ...] = ()) -> None:
        self.findings.append(Diagnostic(code, message, Label(span), notes=notes, help=help, source=self.tree.source))

    def give(self, **values: Any) -> None:
        self.plan = replace(self.plan, **values)

    def span(self, word: str) -> Span:
        return self.spans.get(word, self.tree.span)

    def word(self, word: Word, known: Iterable[str], what: str) -> bool:
        """Whether a word is one of ``known``; if not, it has been reported."""
        names = tuple(known)
        if word.text in names:
            return True
        near = did_you_mean(word.text, names)
        choice = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        help = near if near.startswith("did you mean") else f"write {choice}"
        self.fault("S144", f"`{word.text}` is no {what}", word.span, help)
        return False
