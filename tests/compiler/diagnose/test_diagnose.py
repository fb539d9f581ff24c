"""Causes of lost time and their gains, from traces whose truth is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from schedc.diagnose.causes import Causes
from schedc.diagnose.open_traces import open_traces
from schedc.diagnose.ranking import Diagnosis, diagnose
from schedc.ir.ops import OpKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.measured import cell_inputs, measured_ends
from schedc.step.timeline import simulate
from support.sweeps import halved
from support.synthetic_traces import World, schedule_at, write_steps

SCHEDULES = [("1f1b", {}), ("zbv", {}), ("zbh1", {}), ("interleaved_1f1b", {}), ("dualpipev", {}), ("dualpipe", {})]
NOISE = 0.005


def known(name: str) -> Dependencies:
    return schedule_at(name, P=4, M=16 if name.startswith("dual") else 8)


def diagnosed(folder: Path, schedule: Dependencies, world: World, steps: int = 4) -> Diagnosis:
    return diagnose(Causes(open_traces(write_steps(folder, schedule, world, steps))))


def healthy(folder: Path, schedule: Dependencies, world: World) -> float:
    """Mean time of a step of the same world without its fault."""
    same = World(latency=lambda _a, _b: 0.5, host=world.host, noise=world.noise, seed=world.seed)
    write_steps(folder, schedule, same)
    return float(np.mean(same.makespans))


@pytest.mark.parametrize(("name", "sizes"), SCHEDULES)
def test_measured_times_of_equal_costs_are_those_of_the_timeline(name: str, sizes: dict[str, int]) -> None:
    schedule = known(name)
    timeline = simulate(schedule.schedule, Costs(F=1.25, I=1.0, W=0.75, p2p=0.125), schedule)
    inputs = cell_inputs(schedule)
    lag = np.where(inputs.message, 0.125, 0.0)[:, None]
    assert np.array_equal(measured_ends(inputs, (timeline.end - timeline.start)[:, None], lag)[:, 0], timeline.end)
    assert np.count_nonzero(inputs.message) == np.count_nonzero(schedule.remote)
    far = inputs.message
    assert (schedule.producers[inputs.way[far], inputs.reader[far]] == inputs.producer[far]).all()


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), halved(SCHEDULES))
def test_a_slow_rank_is_first_with_what_it_costs(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    schedule, rank = known(name), 2
    world = World(slow=lambda r, *_: 1.5 if r == rank else 1.0, noise=NOISE)
    found = diagnosed(tmp_path / "slow", schedule, world)
    assert found.residual < 0.002
    first, slow = found.causes[0], float(np.mean(world.makespans))
    assert first.cause.name == f"rank {rank} = others"
    assert first.gain == pytest.approx(1 - healthy(tmp_path / "healthy", schedule, world) / slow, abs=0.005)
    assert first.interval is not None
    assert first.interval[0] <= first.gain <= first.interval[1]
    assert not [each for each in found.causes if each.cause.name.startswith("rank") and each is not first]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank", "distance"),
    halved([("zbh1", 0, 1), ("zbh1", 3, 1), ("interleaved_1f1b", 2, 2), ("dualpipe", 3, 1)]),
)
def test_waits_for_sends_wait_for_the_receiver(name: str, rank: int, distance: int, tmp_path: Path) -> None:
    """A slow rank posts its receives late. Ranks that send to the slow one then wait."""
    schedule = known(name)
    world = World(slow=lambda r, *_: 1.5 if r == rank else 1.0, rendezvous=distance, noise=NOISE)
    replay = open_traces(write_steps(tmp_path / "slow", schedule, world))
    assert replay.steps.sends.cell.size
    assert np.abs(replay.residual).max() < 1e-9
    fine = World(rendezvous=distance, noise=NOISE)
    write_steps(tmp_path / "healthy", schedule, fine)
    first = diagnose(Causes(replay)).causes[0]
    assert first.cause.name == f"rank {rank} = others"
    assert first.gain == pytest.approx(1 - np.mean(fine.makespans) / np.mean(world.makespans), abs=0.005)


@pytest.mark.parametrize(("name", "sizes"), SCHEDULES)
def test_host_time_in_which_a_message_arrives_adds_up(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """A host that is kept off its core looks late at messages that are there: its gap counts a single time."""
    schedule = known(name)
    gaps = np.random.default_rng(3).exponential(8.0, len(schedule))
    replay = open_traces(write_steps(tmp_path, schedule, World(gap=gaps.__getitem__, noise=0.1), 2))
    assert np.abs(replay.residual).max() < 1e-9
    host = (replay.parts.before + replay.parts.after).sum(axis=1)
    assert host.min() > 0.8 * (gaps.sum() + 0.2 * len(schedule))


@pytest.mark.parametrize(("name", "distance"), [("zbh1", 1), ("interleaved_1f1b", 2), ("dualpipe", 1)])
def test_a_message_that_comes_behind_a_wait_for_a_send_adds_up(name: str, distance: int, tmp_path: Path) -> None:
    """A host that is kept off its core behind such a wait looks late at a message that came meanwhile."""
    schedule, draws = known(name), np.random.default_rng(3)
    gaps = draws.exponential(8.0, len(schedule))
    world = World(latency=lambda *_: draws.exponential(4.0), look=gaps.__getitem__, rendezvous=distance, noise=0.1)
    replay = open_traces(write_steps(tmp_path, schedule, world, 2))
    assert replay.steps.sends.cell.size
    assert np.abs(replay.residual).max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_first_stage_without_its_input_gradient_is_no_standard_for_others(rank: int, tmp_path: Path) -> None:
    """torch leaves out the I of the first stage, and its W computes both."""
    schedule = schedule_at("zbv", P=3, M=9)

    def taken(r: int, kind: OpKind, stage: int, _microbatch: int) -> float:
        first = {OpKind.I: 1e-3, OpKind.W: 17 / 8}.get(kind, 1.0) if stage == 0 else 1.0
        return first * (1.5 if r == rank else 1.0)

    found = diagnosed(tmp_path / "slow", schedule, World(slow=taken, noise=NOISE))
    fine = World(slow=lambda _rank, kind, stage, mb: taken(-1, kind, stage, mb), noise=NOISE)
    write_steps(tmp_path / "fine", schedule, fine)
    assert found.causes[0].cause.name == f"rank {rank} = others"
    assert found.causes[0].gain == pytest.approx(1 - np.mean(fine.makespans) / found.measured, abs=0.005)


@pytest.mark.parametrize("kind", [OpKind.W, OpKind.I])
def test_one_slow_kind_of_a_rank_is_named_alone(kind: OpKind, tmp_path: Path) -> None:
    schedule = known("zbv")
    world = World(slow=lambda r, k, *_: 1.6 if (r, k) == (1, kind) else 1.0, noise=NOISE)
    found = diagnosed(tmp_path / "slow", schedule, world)
    assert found.causes[0].cause.name == f"rank 1 {kind.name} = others"
    truth = 1 - healthy(tmp_path / "healthy", schedule, world) / float(np.mean(world.makespans))
    assert found.causes[0].gain == pytest.approx(truth, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("link", [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_slow_link_is_named_with_its_direction(name: str, link: tuple[int, int], tmp_path: Path) -> None:
    schedule = known(name)
    world = World(latency=lambda a, b: 25.0 if (a, b) == link else 0.5, noise=NOISE)
    found = diagnosed(tmp_path / "slow", schedule, world)
    assert found.causes[0].cause.name == f"link {link[0]}>{link[1]} = others"
    truth = 1 - healthy(tmp_path / "healthy", schedule, world) / float(np.mean(world.makespans))
    assert found.causes[0].gain == pytest.approx(truth, abs=0.01)


def test_each_gain_is_on_top_of_the_causes_above_it(tmp_path: Path) -> None:
    """A slow rank and a slow link behind it hide each other: the link gains thrice as much once the rank is mended."""
    schedule = known("1f1b")

    def world(rank: int, link: tuple[int, int]) -> World:
        return World(
            slow=lambda r, *_: 1.5 if r == rank else 1.0, latency=lambda a, b: 12.0 if (a, b) == link else 0.5,
            noise=NOISE,
        )  # fmt: skip

    both, without_rank, fine = world(2, (0, 1)), world(-1, (0, 1)), world(-1, (-1, -1))
    found = diagnosed(tmp_path / "both", schedule, both)
    for name, other in (("link alone", without_rank), ("fine", fine)):
        write_steps(tmp_path / name, schedule, other)
    slow, half, none = (float(np.mean(each.makespans)) for each in (both, without_rank, fine))
    first, second = found.causes[:2]
    assert [first.cause.name, second.cause.name] == ["rank 2 = others", "link 0>1 = others"]
    assert first.gain == pytest.approx((slow - half) / slow, abs=0.01)
    assert second.gain == pytest.approx((half - none) / slow, abs=0.01)
    assert abs(second.gain - second.alone) > 0.04


def test_a_ranking_ends_where_all_causes_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Causes.all
    monkeypatch.setattr(
        Causes, "all", lambda *given: [each for each in whole(*given) if each.name == "rank 2 = others"]
    )
    found = diagnosed(tmp_path, known("1f1b"), World(slow=lambda rank, *_: 1.5 if rank == 2 else 1.0))
    assert [each.cause.name for each in found.causes] == ["rank 2 = others"]


def test_a_larger_stage_is_no_slow_rank(tmp_path: Path) -> None:
    schedule = known("zbv")
    found = diagnosed(tmp_path, schedule, World(slow=lambda _r, _k, s, _m: 1.5 if s == 7 else 1.0, noise=NOISE))
    assert found.causes[0].cause.name == "stage 7 = others"
    paths = sorted(tmp_path.iterdir())
    expected = Costs(F=(10.0,) * 7 + (15.0,), I=(9.0,) * 7 + (13.5,), W=(8.0,) * 7 + (12.0,))
    told = diagnose(Causes(open_traces(paths), expected))
    assert not [each for each in told.causes if each.cause.name.startswith(("rank", "stage"))]


def test_microbatches_of_unequal_work_are_the_data(tmp_path: Path) -> None:
    schedule, work = known("1f1b"), [0.6, 1.0, 1.7, 0.8, 1.0, 0.7, 1.4, 0.8]
    world = World(slow=lambda _r, _k, _s, m: work[m], noise=NOISE)
    found = diagnosed(tmp_path / "slow", schedule, world)
    assert found.causes[0].cause.name == "data = equal"
    truth = 1 - healthy(tmp_path / "equal", schedule, world) / float(np.mean(world.makespans))
    assert found.causes[0].gain == pytest.approx(truth, abs=0.01)


def test_pauses_host_time_and_late_ranks_have_causes_of_their_own(tmp_path: Path) -> None:
    schedule = known("1f1b")
    plain = healthy(tmp_path / "healthy", schedule, World(noise=NOISE))
    cell = int(schedule.rank_start[2]) + 5
    for number, (fault, name, least) in enumerate(
        [
            (World(pause=(cell, 60.0), noise=NOISE), "pauses = none", 0.05),
            (World(pause=(cell, 60.0), off_core=1.0, noise=NOISE), "cores = own", 0.05),
            (World(pause=(cell, 60.0), collecting=1.0, noise=NOISE), "garbage = none", 0.05),
            (World(late=lambda rank: 40.0 * (rank == 1), noise=NOISE), "start = together", 0.05),
            (World(host=3.0, noise=NOISE), "host = 0", 0.05),
        ]
    ):
        found = diagnosed(tmp_path / str(number), schedule, fault)
        assert found.causes[0].cause.name == name
        truth = 1 - plain / float(np.mean(fault.makespans))
        assert found.causes[0].gain > least
        assert found.causes[0].gain == pytest.approx(truth, abs=0.015)


def test_what_interrupts_compute_is_named_once_by_its_share(tmp_path: Path) -> None:
    """A pause has two causes of three tenths each: no core, and garbage collection."""
    schedule = known("1f1b")
    world = World(pause=(int(schedule.rank_start[2]) + 5, 60.0), off_core=0.3, collecting=0.3, noise=NOISE)
    found = diagnosed(tmp_path, schedule, world)
    names = [each.cause.name for each in found.causes]
    assert names.count("cores = own") == names.count("garbage = none") == names.count("pauses = none") == 1
    cores = next(each for each in found.causes if each.cause.name == "cores = own")
    assert "18.00 ms of them on rank 2" in cores.cause.why
    assert cores.alone == pytest.approx(18.0 / found.measured, abs=0.01)


def test_steps_of_one_file_are_those_of_several(tmp_path: Path) -> None:
    paths = write_steps(tmp_path / "many", known("zbv"), World(slow=lambda r, *_: 1.5 if r == 1 else 1.0, noise=0.05))
    documents = [json.loads(path.read_text()) for path in paths]
    for number, document in enumerate(documents):
        for event in document["traceEvents"]:
            event["ts"] += 1e6 * number
            event.setdefault("args", {})["step"] = number
    events = [event for document in reversed(documents) for event in document["traceEvents"]]
    one = tmp_path / "one.json"
    one.write_text(json.dumps({**documents[0], "traceEvents": events}))
    a, b = (json.loads(run(str(path), "--json").stdout) for path in (tmp_path / "many", one))
    assert a["steps"] == b["steps"] == 4
    assert [each["cause"] for each in a["causes"]] == [each["cause"] for each in b["causes"]]
    assert b["causes"][0]["interval"] == pytest.approx(a["causes"][0]["interval"])


def test_a_healthy_run_has_no_cause_and_the_bubble_of_its_schedule(tmp_path: Path) -> None:
    schedule = known("zbv")
    found = diagnosed(tmp_path, schedule, World(noise=NOISE, host=0.05, latency=lambda _a, _b: 0.05))
    assert not [each for each in found.causes if each.gain > 0.01]
    step = simulate(schedule.schedule, Costs(F=10.0, I=9.0, W=8.0), schedule)
    assert sum(found.bubble.values()) == pytest.approx(step.bubble_ratio, abs=0.01)
    assert found.ideal == pytest.approx(step.makespan, rel=0.01)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["diagnose", *arguments])


def test_the_command_answers_by_status_and_json(tmp_path: Path) -> None:
    schedule = known("1f1b")
    fine, slow = tmp_path / "fine", tmp_path / "slow"
    write_steps(fine, schedule, World(noise=NOISE, host=0.05, latency=lambda _a, _b: 0.05))
    write_steps(slow, schedule, World(slow=lambda r, *_: 1.5 if r == 3 else 1.0, noise=NOISE))
    assert run(str(fine)).exit_code == 0
    assert run(str(slow)).exit_code == 3
    assert run(str(slow), "--above", "40%").exit_code == 0
    questions = ["rank 3 = others", "rank 0 = others", "schedule=zbv", "M=16"]
    result = run(str(slow), "--json", *(word for each in questions for word in ("--what-if", each)))
    told = json.loads(result.stdout)
    assert (result.exit_code, told["schema"], told["steps"], told["ranks"]) == (3, "schedc.diagnosis/1", 4, 4)
    gains = {each["question"]: each["gain"] for each in told["what_if"]}
    assert gains["rank 3 = others"] == pytest.approx(told["causes"][0]["alone"])
    assert gains["rank 0 = others"] == pytest.approx(0.0, abs=0.002)
    assert gains["M=16"] > 0.05
    assert run(str(slow), "--what-if", "rank 9 = others").exit_code == 2
    assert "S619" in run(str(slow), "--what-if", "slower").stderr
    assert "did you mean `rank 1 = others`?" in run(str(slow), "--what-if", "rank 1 = other").stderr


def test_another_program_is_refused_with_what_differs(tmp_path: Path) -> None:
    write_steps(tmp_path, known("1f1b"), World())
    assert run(str(tmp_path), "--program", "1f1b", "-D", "P=4", "-D", "M=8").exit_code in (0, 3)
    other = run(str(tmp_path), "--program", "gpipe", "-D", "P=4", "-D", "M=8")
    assert other.exit_code == 2
    assert "S617" in other.stderr
    assert "as cell 4 of step 0; the schedule has" in other.stderr
    assert "S617" in run(str(tmp_path), "--program", "1f1b", "-D", "P=3", "-D", "M=8").stderr


def test_clocks_that_contradict_messages_are_refused(tmp_path: Path) -> None:
    (path, *_) = write_steps(tmp_path, known("1f1b"), World(), steps=1)
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        event["ts"] += 30_000.0 * (event["pid"] == 0)
    path.write_text(json.dumps(document))
    refused = run(str(path))
    assert refused.exit_code == 2
    assert "S618" in refused.stderr
    assert "clocks" in refused.stderr


def test_times_that_do_not_add_up_are_not_ranked(tmp_path: Path) -> None:
    from schedc.diagnose.told import to_text

    replay = open_traces(write_steps(tmp_path, known("1f1b"), World()))
    wrong = replace(replay, parts=replay.parts.scaled({"body": 1.2}))
    found = diagnose(Causes(wrong))
    assert not found.trusted
    assert not found.causes
    assert any("no cause is ranked" in line for line in to_text(wrong, found, ()))
