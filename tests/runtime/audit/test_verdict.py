"""Each way in which digests differ leads to its verdict, on the right rank."""

from __future__ import annotations

import pytest

from schedc_runtime.audit.verdict import AuditVerdict, RankDigests, judge, link_verdict

NAMES = ("rank 0", "rank 1")
GIVEN, WEIGHTS = {"input": "i"}, {"w": "w"}


def suspect(*runs: str, **changes: dict[str, str]) -> RankDigests:
    parts = {"given": GIVEN, "weights": WEIGHTS, "held": GIVEN, "before": WEIGHTS, **changes}
    return RankDigests(results=[{"activation": run} for run in runs], **parts)


def other(*runs: str, borrowed: bool = False, **changes: dict[str, str]) -> RankDigests:
    parts = {"given": GIVEN, "weights": WEIGHTS, **changes}
    return RankDigests(results=[{"activation": run, "more": run} for run in runs], borrowed=borrowed, **parts)


CASES = [
    ("the suspect's own repetition differs", suspect("bad", "a", "a"), other("a", "a"), None, "transient", NAMES[:1]),
    ("it never repeats itself", suspect("bad", "worse", "a"), other("a", "a"), None, "transient", NAMES[:1]),
    ("the other's repetition differs", suspect("a", "a", "a"), other("bad", "a"), None, "transient", NAMES[1:]),
    ("both never repeat themselves", suspect("a", "b", "c"), other("d", "e"), None, "unstable", ()),
    ("its input has changed in memory", suspect("b", "b", "b", held={"input": "x"}), other("a", "a"), None,
     "memory", NAMES[:1]),
    ("its weights have changed", suspect("b", "b", "b", weights={"w": "x"}), other("a", "a"), None,
     "memory", NAMES[:1]),
    ("the input has changed on its way", suspect("b", "b", "b"), other("a", "a", given={"input": "x"}), None,
     "link", NAMES),
    ("the weights have changed on their way", suspect("b", "b", "b"),
     other("a", "a", weights={"w": "x"}, borrowed=True), None, "link", NAMES),
    ("the third tells against the suspect", suspect("b", "b", "b"), other("a", "a"), other("a"),
     "persistent", NAMES[:1]),
    ("the third tells against the other", suspect("a", "a", "a"), other("b", "b"), other("a"), "persistent", NAMES[1:]),
    ("all three differ", suspect("a", "a", "a"), other("b", "b"), other("c"), "one of two", NAMES),
    ("there is no third", suspect("a", "a", "a"), other("b", "b"), other(), "one of two", NAMES),
    ("the third holds the suspect's weights", suspect("a", "a", "a"), other("b", "b", weights={"w": "x"}), other("a"),
     "memory", NAMES[1:]),
    ("the third holds the other's weights", suspect("b", "b", "b", weights={"w": "x"}, before={"w": "x"}),
     other("a", "a"), other("a"), "memory", NAMES[:1]),
    ("weights differ and the third has borrowed them", suspect("b", "b", "b", weights={"w": "x"}, before={"w": "x"}),
     other("a", "a"), other("b", borrowed=True, weights={"w": "x"}), "one of two", NAMES),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "third", "kind", "ranks"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])  # fmt: skip
def test_a_difference_has_its_verdict(first, second, third, kind, ranks):
    verdict = judge(NAMES, first, second, third)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (kind, tuple(ranks))
    assert verdict.names_one is (kind not in ("one of two", "unstable"))


def test_two_ranks_that_repeat_themselves_need_a_third():
    assert judge(NAMES, suspect("b", "b", "b"), other("a", "a")) is None


@pytest.mark.parametrize("value", ["input", "activation", "output gradient", "input gradient"])
def test_a_message_that_changes_on_its_way_names_the_link(value):
    ends = {value: ("rank 2", "rank 3")}
    assert link_verdict(ends, {value: "a"}, {value: "b"}) == AuditVerdict("link", ("rank 2", "rank 3"), (value,))
    assert link_verdict(ends, {value: "a"}, {value: "a"}) is None
