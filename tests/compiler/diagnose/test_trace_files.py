"""Files that `schedc diagnose` reads: recorded traces of torch, and files that are refused with only our errors."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from schedc.diagnose import trace_text
from schedc.diagnose.causes import Causes
from schedc.diagnose.open_traces import open_traces
from schedc.diagnose.ranking import diagnose
from support.paths import ROOT
from support.synthetic_traces import World, schedule_at, write_steps

SLOW_RANK = ROOT / "examples" / "traces" / "slow_rank"
"""torch's Interleaved1F1B on four gloo ranks; rank 2 sleeps 1.5 times as long."""
ONE_F_ONE_B = ROOT / "tests" / "data" / "traces" / "torch_1f1b"
"""torch's Schedule1F1B, with chunks named as the guide says; rank 1 sleeps 1.5 times as long."""

Document = dict[str, Any]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diagnose", *map(str, arguments)])


def documents(folder: Path) -> dict[str, Document]:
    return {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in sorted(folder.iterdir())}


def written(found: dict[str, Document], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, document in found.items():
        (folder / name.removesuffix(".gz")).write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(("folder", "rank", "stages"), [(SLOW_RANK, 2, 8), (ONE_F_ONE_B, 1, 4)])
def test_traces_of_torch_name_the_slow_rank(folder: Path, rank: int, stages: int) -> None:
    replay = open_traces([folder])
    found = diagnose(Causes(replay))
    assert (replay.dependencies.schedule.ranks, replay.dependencies.schedule.stages) == (4, stages)
    assert found.residual < 0.02
    assert found.causes[0].cause.name == f"rank {rank} = others"
    assert 0.15 < found.causes[0].gain < 0.3


def test_the_order_of_files_and_their_form_do_not_matter(tmp_path: Path) -> None:
    plain = written(documents(SLOW_RANK), tmp_path / "plain")
    backwards = run("--json", *sorted(plain.iterdir(), reverse=True))
    assert backwards.stdout == run("--json", SLOW_RANK).stdout


def test_ranges_of_the_device_are_the_cells_where_there_are_any(tmp_path: Path) -> None:
    """The host only launches: its ranges are short and early, and say nothing of how long a rank computes."""
    found = documents(SLOW_RANK)
    for document in found.values():
        events = document["traceEvents"]
        for event in list(events):
            if event["name"].startswith("PP:") and event["name"][-1].isdigit() and "_" not in event["name"]:
                start = min(
                    (e["ts"] for e in events if e.get("cat") == "cpu_op" and 0 <= e["ts"] - event["ts"] < event["dur"]),
                    default=event["ts"],
                )
                ended = [e["ts"] + e["dur"] for e in events if e["name"] == "gloo:recv"]
                start = max([start, *(t for t in ended if event["ts"] < t < event["ts"] + event["dur"] and t <= start)])
                device = {**event, "cat": "gpu_user_annotation", "tid": 7, "ts": start}
                events.append(device | {"dur": event["ts"] + event["dur"] - start})
                event["dur"] = 1.0
    told = diagnose(Causes(open_traces([written(found, tmp_path / "device")])))
    assert told.residual < 0.02
    assert told.causes[0].cause.name == "rank 2 = others"
    assert told.causes[0].gain == pytest.approx(diagnose(Causes(open_traces([SLOW_RANK]))).causes[0].gain, abs=0.01)


def test_ranges_without_microbatches_are_refused_with_what_to_record(tmp_path: Path) -> None:
    found = documents(SLOW_RANK)
    for document in found.values():
        for event in document["traceEvents"]:
            event["name"] = "forward_step" if event["name"].startswith("PP:") else event["name"]
    refused = run(written(found, tmp_path / "megatron"))
    assert refused.exit_code == 2
    for word in ("S616", "forward_step", "record_function(f'Forward {i}')"):
        assert word in refused.stderr


@pytest.mark.slow
def test_a_trace_without_a_name_is_asked_for_another_size() -> None:
    """The library is searched for the schedule whose ops the trace has."""
    (answer,) = json.loads(run(SLOW_RANK, "--json", "--what-if", "M=16").stdout)["what_if"]
    (same,) = json.loads(run(SLOW_RANK, "--json", "--what-if", "schedule=interleaved_1f1b, M=16").stdout)["what_if"]
    assert answer["gain"] == same["gain"] > 0.02
    for question, remedy in (("experts = mean", "rows of experts"), ("cores = own", "no core")):
        refused = run(SLOW_RANK, "--what-if", question)
        assert refused.exit_code == 2
        assert remedy in refused.stderr
    assert "diagnose each file" in run(SLOW_RANK, "--live").stderr


def _without_rank(found: dict[str, Document]) -> None:
    del found["rank1.json.gz"]


def _twice_one_rank(found: dict[str, Document]) -> None:
    found["rank1.json.gz"]["distributedInfo"]["rank"] = 0


def _a_step_less(found: dict[str, Document]) -> None:
    events = found["rank3.json.gz"]["traceEvents"]
    last = max(event["ts"] for event in events if event["name"] == "PP:3F0")
    found["rank3.json.gz"]["traceEvents"] = [event for event in events if event["ts"] < last]


def _half_a_step(found: dict[str, Document]) -> None:
    for document in found.values():
        events = document["traceEvents"]
        middle = sorted(event["ts"] for event in events)[len(events) * 3 // 4]
        document["traceEvents"] = [event for event in events if event["ts"] < middle]


def _another_clock(found: dict[str, Document]) -> None:
    found["rank0.json.gz"]["baseTimeNanoseconds"] += 50_000_000


def _no_times(found: dict[str, Document]) -> None:
    found["rank2.json.gz"]["traceEvents"][5]["ts"] = "soon"


def _huge_numbers(found: dict[str, Document]) -> None:
    for event in found["rank2.json.gz"]["traceEvents"]:
        event["name"] = event["name"].replace("PP:2F0", "PP:999999999F999999999")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (_without_rank, "S617", "stage 1"),
        (_twice_one_rank, "S616", "two files are of rank 0"),
        (_a_step_less, "S616", "steps, another rank has"),
        (_half_a_step, "S61", "step"),
        (_another_clock, "S618", "ms before the message"),
        (_no_times, "S616", "has no times"),
        (_huge_numbers, "S617", "no schedule"),
    ],
)
def test_files_that_contradict_each_other_are_refused(
    change: Callable[[dict[str, Document]], None], code: str, words: str, tmp_path: Path
) -> None:
    found = documents(SLOW_RANK)
    change(found)
    refused = run(written(found, tmp_path / "changed"))
    assert refused.exit_code == 2, refused.output
    assert code in refused.stderr
    assert words in refused.stderr


def test_sizes_are_checked_before_anything_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_text, "MOST_BYTES", 1 << 16)
    bomb = tmp_path / "rank0.json.gz"
    bomb.write_bytes(gzip.compress(b"[" * (1 << 24)))
    refused = run(bomb)
    assert refused.exit_code == 2
    assert "larger than" in refused.stderr


def test_altered_files_end_with_our_errors_alone(tmp_path: Path) -> None:
    """Cut, flipped and swapped bytes, other JSON types and deep nesting: never a traceback."""
    draw = random.Random(7)
    own = write_steps(tmp_path / "own", schedule_at("1f1b", P=2, M=2), World(), steps=1)[0].read_bytes()
    packed = (SLOW_RANK / "rank0.json.gz").read_bytes()
    values = [None, True, -1, 1e308, "x", [], {}, {"ts": {}}, [[1]], float("nan"), 10**40]
    cases: list[bytes] = [b"", b"null", b"[]", b"[" * 100_000, b'{"traceEvents": 3}', b"\xff\xfe", b"\x1f\x8b"]
    for _ in range(25):
        place = draw.randrange(len(packed))
        cases += [packed[:place], packed[:place] + bytes([draw.randrange(256)]) + packed[place + 1 :]]
        place = draw.randrange(len(own))
        cases += [own[:place], own[:place] + bytes([draw.randrange(256)]) + own[place + 1 :]]
    for _ in range(60):
        document = json.loads(own)
        event = draw.choice(document["traceEvents"])
        event[draw.choice(list(event))] = draw.choice(values)
        document[draw.choice(["otherData", "traceEvents", "baseTimeNanoseconds", "extra"])] = (
            draw.choice(values) if draw.random() < 0.3 else document.get("traceEvents")
        )
        cases.append(json.dumps(document).encode())
    for number, case in enumerate(cases):
        path = tmp_path / f"case{number}.json"
        path.write_bytes(case)
        result = run(path)
        assert result.exit_code in (0, 2, 3), (number, result.output)
