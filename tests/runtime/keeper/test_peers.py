"""Copies of images at neighbours: the rule of the safe step, what is sent, and nodes that are lost and come back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper import sender
from schedc_runtime.keeper.backed import ABSENT, HELD, UNDER_WAY, BackedImages, free_image
from schedc_runtime.keeper.images import TENSORS, Image, ImageHeader
from schedc_runtime.keeper.lost import HeldImage, newest_state
from schedc_runtime.keeper.peer_server import PeerServer
from schedc_runtime.keeper.peering import check_nodes
from schedc_runtime.keeper.places import Peers, Places, Watch
from schedc_runtime.keeper.sender import ImageSender
from schedc_runtime.ranks.processes import this_process
from schedc_runtime.saved.safetensors import safetensors_header
from support.hostile_messages import PUT, READ, TOKEN, answered, body_of, hostile_message, listening, message
from support.kept_runs import Run
from support.lost_jobs import COPIES, flaws
from support.paths import ROOT
from support.sweeps import in_sweeps, swept

NUMBERS = 1 << 16


@pytest.mark.slow
@pytest.mark.processes
def test_lost_nodes_come_back_with_their_bits() -> None:
    """Keepers, sockets and meetings are those of a run. Its ranks have no torch, and go on after each loss."""
    command = [sys.executable, "-m", "support.lost_nodes", "6"]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert (figures["cases"], figures["back"], figures["failures"]) == (6, 6, [])
    assert figures["snapshots_lost_max"] <= 1
    assert figures["brought"] >= 12, "each lost node has two images to get back"


@in_sweeps(
    "test_lost_nodes_come_back_with_their_bits",
    "runtime/keeper/test_kept_jobs.py::test_a_training_goes_on_behind_each_fault",
)
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.processes
def test_a_job_goes_on_with_the_copies_of_a_lost_node() -> None:
    """Under torchrun, on a node that waited: states copied at once, and states copied in pieces beside a step."""
    assert flaws(swept(COPIES, COPIES[1:])) == []


def test_hostile_messages_are_refused(tmp_path: Path) -> None:
    draw = random.Random(4)
    for number in range(80):
        (folder := tmp_path / str(number)).mkdir()
        what, outcome = hostile_message(folder, draw)
        assert outcome in ("refused", "read"), what
    with listening(tmp_path) as (places, server, faults):
        assert answered(server.port, message({**PUT, "token": "5b" * 32}, body_of())) == "refused"
        assert answered(server.port, message({**READ, "token": TOKEN[:-1]})) == "refused"
        assert not places.images(1)
        assert answered(server.port, message(PUT, body_of())) == "held"
        assert answered(server.port, message(READ)) == "bytes"
        assert faults == []


class Two:
    """Two nodes: the first has one rank, the second takes its images."""

    def __init__(self, folder: Path, speed: float = 1e12) -> None:
        self.folder = folder
        self.here, self.there = Places.of_run(folder, "here"), Places.of_run(folder, "there")
        self.size = TENSORS + 8 + 200 + 2 * NUMBERS + 4096
        self.images = [Image.made(path, self.size) for path in self.here.image_paths(0)]
        taking = Peers(TOKEN, "127.0.0.1", 0, None, None, [1], [0], self.size, speed)
        self.there.say_peers(taking)
        self.server = PeerServer(self.there, taking)
        to = ("127.0.0.1", self.server.port)
        self.here.say_peers(Peers(TOKEN, "127.0.0.1", 0, to, None, [0], [1], self.size, speed))

    def write(self, number: int, step: int, safe: int = -1, twice: bool = False) -> bytes:
        """Put a state of ``step`` into an image; returns its file."""
        content = safetensors_header((key, "U8", (NUMBERS,)) for key in ("a", "b"))
        content += bytes([step]) * NUMBERS + bytes([step + 100]) * NUMBERS
        self.images[number].clear()
        self.images[number].write(content, TENSORS)
        boxes = [{"key": key, "offset": [0], "size": [NUMBERS]} for key in ("a", "b")]
        tensors = {box["key"]: {"dtype": "U8", "shape": [NUMBERS], "boxes": [box]} for box in boxes}
        said: dict[str, Any] = {"attempt": "x", "run": {"world": 1}, "facts": {}, "tensors": tensors, "safe": safe}
        text = json.dumps(said | ({"elsewhere": ["a"]} if twice else {})).encode()
        self.images[number].finish(step, step, False, len(content), text)
        return content

    def copies(self) -> dict[int, bytes]:
        """By step, the file that the neighbour holds."""
        held = {}
        for image in self.there.images(0):
            if (header := image.header()) is not None:
                assert header.copy
                held[header.step] = image.read(TENSORS, header.tensors)
            image.close()
        return held


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    nodes = Two(tmp_path)
    yield nodes
    nodes.server.close()


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_neighbour_keeps_the_safe_image(two: Two) -> None:
    """The newest image goes there, once, and over the older of those that are not safe."""
    sending = ImageSender(two.here)
    try:
        files = {1: two.write(0, 1)}
        until(lambda: two.images[0].backed)
        header = two.images[0].header()
        assert header is not None
        assert sending.sent == header.tensors + header.description
        for step, safe, left in ((2, 1, {1, 2}), (3, 1, {1, 3}), (4, 3, {3, 4}), (5, 3, {3, 5})):
            files[step] = two.write(step % 2, step, safe)
            assert not two.images[step % 2].backed, "the last state was backed, and this one is not yet"
            until(lambda step=step: two.images[step % 2].backed)
            assert two.copies() == {each: files[each] for each in left}
        sent = sending.sent
        time.sleep(0.1)
        assert sending.sent == sent
    finally:
        sending.close()


def test_what_two_nodes_hold_is_not_sent(two: Two) -> None:
    sending = ImageSender(two.here)
    try:
        whole = two.write(0, 1, twice=True)
        until(lambda: two.images[0].backed)
        assert NUMBERS < sending.sent < NUMBERS + 2000
        copy = two.copies()[1]
        assert copy[-NUMBERS:] == whole[-NUMBERS:]
        assert copy[-2 * NUMBERS : -NUMBERS] == bytes(NUMBERS)
    finally:
        sending.close()


def test_a_sender_keeps_to_its_speed(tmp_path: Path) -> None:
    two = Two(tmp_path, speed=2e5)
    sending = ImageSender(two.here)
    try:
        two.write(0, 1)
        begin = time.monotonic()
        two.write(0, 2)
        until(lambda: two.images[0].backed)
        two.write(1, 3)
        until(lambda: two.images[1].backed)
        assert time.monotonic() - begin >= 0.5, "two states of 131 kB at 200 kB a second; the first piece is free"
    finally:
        sending.close()
        two.server.close()


@pytest.mark.parametrize("trouble", ["dead", "token", "full"])
def test_a_neighbour_in_trouble_stops_nothing(
    two: Two, trouble: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The trouble is reported once. Ranks then go on without its copies, and wait for it again when it answers."""
    monkeypatch.setattr(sender, "PATIENCE", 0.2)
    monkeypatch.setattr(sender, "_AGAIN", 0.02)
    peers = two.there.peers()
    assert peers is not None
    if trouble == "dead":
        two.server.close()
    elif trouble == "token":
        two.there.say_peers(peers._replace(token="00" * 32))
    else:
        two.there.say_peers(peers._replace(most=-(1 << 40)))
    sending = ImageSender(two.here)
    backed, lines = BackedImages(two.here, two.images), list[str]()

    def said() -> str:
        lines.append(capfd.readouterr().err)
        return "".join(lines)

    try:
        two.write(0, 1)
        backed.under = 1
        assert backed.lacks() == UNDER_WAY
        until(lambda: "stay on this node alone" in said())
        two.here.say(Watch(this_process(), "", 1, 0, -1, trouble=sending.trouble))
        assert (backed.lacks(), backed.alone) == (HELD, 1)
        time.sleep(0.1)
        assert said().count("stay on this node alone") == 1
        if trouble != "dead":
            two.there.say_peers(peers)
            until(lambda: two.images[0].backed)
            until(lambda: "answers again" in said())
            assert sending.trouble == ""
    finally:
        sending.close()


def test_all_ranks_agree_on_the_safe_step(two: Two) -> None:
    backed = BackedImages(two.here, two.images)
    assert (backed.lacks(), free_image([None, None], backed.safe)) == (HELD, 0)
    backed.agreed(HELD)
    two.write(0, 1)
    backed.under = 1
    assert backed.lacks() == UNDER_WAY
    backed.agreed(UNDER_WAY)
    assert (backed.under, backed.safe) == (1, None), "no other state is copied meanwhile"
    header = two.images[0].header()
    assert header is not None
    two.images[0].note_backed(header)
    assert backed.lacks() == HELD
    backed.agreed(UNDER_WAY)
    assert backed.safe is None, "another rank's neighbour has not got it yet"
    backed.agreed(HELD)
    assert (backed.under, backed.safe, free_image([1, None], 1), free_image([2, 1], 1)) == (None, 1, 1, 0)
    backed.under = 2
    assert backed.lacks() == ABSENT
    backed.agreed(ABSENT)
    assert (backed.under, backed.safe) == (None, 1), "a rank that has no image of it lets all give it up"
    two.write(1, 2, safe=1)
    backed.under = 2
    two.images[1].clear()
    backed.dropped(2)
    assert (backed.under, backed.safe) == (None, 1)
    alone = BackedImages(two.here, two.images, neighbours=False)
    two.write(1, 2)
    alone.under = 2
    assert alone.lacks() == HELD, "without neighbours its own image is enough"
    alone.under = 3
    assert alone.lacks() == ABSENT


def _held(rank: int, step: int, attempt: str = "x", copy: bool = False, world: int = 2) -> HeldImage:
    header = ImageHeader(1, step, False, 8, 2, sha256(b"%d %d" % (rank, step)).digest(), copy)
    return HeldImage(rank, header.packed().hex(), 5000, attempt, world, False)


@pytest.mark.parametrize(
    ("nodes", "step"),
    [
        ([[_held(0, 5), _held(0, 6)], [_held(1, 5), _held(1, 6)]], 6),
        ([[_held(0, 5), _held(0, 6)], [_held(1, 5)]], 5),
        ([[_held(0, 5), _held(1, 5, copy=True)], []], 5),
        ([[_held(0, 5), _held(0, 6), _held(1, 5, copy=True)], []], 5),
        ([[_held(0, 6), _held(1, 5, copy=True)], []], None),
        ([[_held(0, 5)], [_held(1, 5, attempt="y")]], None),
        ([[_held(0, 5), _held(1, 6, copy=True)], [_held(1, 5), _held(0, 6, copy=True)]], 5),
        ([[_held(0, 5, world=3)], [_held(1, 5)]], None),
    ],
    ids=["both", "older", "copy", "no newer copy", "none", "attempts", "dropped by its ranks", "worlds"],
)
def test_the_newest_state_of_all_nodes(nodes: list[list[HeldImage]], step: int | None) -> None:
    state = newest_state(nodes, 2)
    assert (None if state is None else state.step) == step
    if state is not None:
        assert sorted(state.holders) == [0, 1]
        assert newest_state(nodes, 2, state.step) == state
        older = newest_state(nodes, 2, state.step - 1)
        assert older is None or older.step < state.step, "a state that is not proved is no state to go on from"


def test_one_node_has_no_neighbour(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault, match="replicas=1 copies states to a neighbour, and all 1 ranks") as refused:
        Run(tmp_path / "run", "1f1b", 2, replicas=1)
    assert "two machines or more" in refused.value.help
    for replicas, speed in ((2, 1e9), (-1, 1e9), (1, 0.0), (1, float("nan"))):
        with pytest.raises(RuntimeFault, match=f"replicas={replicas}, peer_speed"):
            check_nodes(replicas, speed, [[0], [1]], "/dev/shm")
