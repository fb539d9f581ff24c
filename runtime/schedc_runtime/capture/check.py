"""Says what a graph of a step cannot hold, with file, line and instruction, by comparing two steps with other data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from schedc_runtime.capture.recording import SeenFault, SeenLaunch, StepRecording, step_recording


class CaptureKind(NamedTuple):
    """text: what happens; ``{}`` is the operation or the tensor."""

    text: str
    remedy: str


KINDS = {
    "host read": CaptureKind(
        "`{}` asks the host for values", "compute with the tensor on the device, or read it behind the step"
    ),
    "draw": CaptureKind(
        "`{}` draws random numbers whose key the host sets",
        'switch dropout off, or let a counter of the device go on: Pipeline(rng="torch")',
    ),
    "upload": CaptureKind("{} come from the host", "make the tensor once, before the steps, or fill it on the device"),
    "other list": CaptureKind(
        "two steps launch other operations: {}", "take padded or bounded routes, and batches of one shape"
    ),
    "scalar": CaptureKind("a number in `{}` is another one in each step", "keep it in a tensor on the device"),
    "moved": CaptureKind("`{}` takes memory from outside that has moved", "write into one tensor, in place"),
    "gradient": CaptureKind("the gradient of `{}` was dropped", "zero it: zero_grad(set_to_none=False)"),
    "nothing": CaptureKind("no operation ran{}", "call a step that trains"),
}
"""What a graph cannot hold, by kind."""


@dataclass(frozen=True)
class CaptureFinding:
    """What a graph cannot hold. kind: a key of `KINDS`. what: the operation or tensor.

    where: file, line and instruction; empty for what no operation shows.
    """

    kind: str
    what: str
    where: str

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        at = f" at {self.where}" if self.where else ""
        return f"{kind.text.format(self.what)}{at}\n  remedy: {kind.remedy}"


@dataclass(frozen=True)
class CaptureReport:
    """What two steps have shown. launches: operations of a step that are no views."""

    findings: tuple[CaptureFinding, ...]
    launches: int

    def __str__(self) -> str:
        if not self.findings:
            return f"a graph can hold the step: {self.launches} launches, the same in both steps"
        return "\n".join(map(str, self.findings))


def capturable(step: Callable[[int], Any]) -> CaptureReport:
    """What a graph of a step cannot hold. step(n): runs the n-th step, with data of its own.

        report = capturable(lambda n: pipe.step(*batches[n]))
        assert not report.findings, report

    Three steps run. The first is not looked at: libraries and layers allocate in it. Of a pipeline's step
    the part between its first instruction and its last JOIN counts, of any other function all that it runs.
    """
    step(0)
    recordings = []
    for number in (1, 2):
        with step_recording() as taken:
            step(number)
        recordings.append(taken)
    return capture_report(*recordings)


def capture_report(*runs: StepRecording) -> CaptureReport:
    """What recordings of one step show: each by itself, and the last two side by side."""
    seen = {(each.kind, each.place.file, each.place.line): each for run in runs for each in run.seen.values()}
    findings = [_finding(each) for each in seen.values()]
    if len(runs) > 1:
        findings += [_gradient(name) for name in _dropped(*runs[-2:])]
        findings += _differences(runs[-2].launches, runs[-1].launches)
    if not runs[-1].launches:
        findings.append(CaptureFinding("nothing", "", ""))
    once: dict[tuple[str, str], CaptureFinding] = {}
    for each in findings:
        once.setdefault((each.kind, each.where.partition(",")[0] or each.what), each)
    return CaptureReport(tuple(once.values()), len(runs[-1].launches))


def _finding(seen: SeenFault) -> CaptureFinding:
    return CaptureFinding(seen.kind, seen.what, str(seen.place))


def _gradient(name: str) -> CaptureFinding:
    return CaptureFinding("gradient", name, "")


def _dropped(first: StepRecording, second: StepRecording) -> list[str]:
    """Parameters whose gradient was not there when a step began, or lies elsewhere in the other step."""
    names = dict.fromkeys([*first.gradients, *second.gradients])
    both = {name: (first.gradients.get(name, 0), second.gradients.get(name, 0)) for name in names}
    return [name for name, (old, new) in both.items() if old != new or not new]


def _differences(first: Sequence[SeenLaunch], second: Sequence[SeenLaunch]) -> Iterator[CaptureFinding]:
    """Scalars and memory that change, and where the lists part, behind which nothing can be compared."""
    for old, new in zip_longest(first, second):
        if old is None or new is None or (old.name, old.forms) != (new.name, new.forms):
            here = new or old
            yield CaptureFinding("other list", f"{_shown(old)}, then {_shown(new)}", str(here.place))
            return
        if not _same(old.scalars, new.scalars):
            yield CaptureFinding("scalar", new.name, str(new.place))
        if old.outside != new.outside:
            yield CaptureFinding("moved", new.name, str(new.place))


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) == len(new) and all(a is b or a == b or (a != a and b != b) for a, b in zip(old, new, strict=True))


def _shown(launch: SeenLaunch | None) -> str:
    if launch is None:
        return "nothing"
    return f"`{launch.name}` of {', '.join(str(list(form[0])) for form in launch.forms) or 'no tensor'}"
