"""What checkpoints refuse: folders of others, too little memory, states that are no data; and what a keeper costs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.keeper.images import Image, too_small
from schedc_runtime.keeper.places import Places
from schedc_runtime.trainers.further_states import packed, unpacked
from support.kept_runs import Run


@pytest.mark.slow
def test_a_keeper_costs_little(tmp_path: Path) -> None:
    """It loads no torch: 60 MB at most, and 5 % of a core while ranks train."""
    run = Run(tmp_path / "run", "1f1b", 2)
    watch = run.saved.places.watch()
    assert watch is not None
    stat, statm = Path(f"/proc/{watch.process.pid}/stat"), Path(f"/proc/{watch.process.pid}/statm")
    before = sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))
    time.sleep(1.0)
    ticks = sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) - before
    assert ticks <= 5
    assert int(statm.read_text().split()[1]) * 4096 < 60e6
    assert watch.resident < 60e6
    run.train(1)
    run.saved.close()


@pytest.mark.slow
def test_another_model_seed_or_argument_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "1f1b", 2)
    run.train(2)
    run.saved.close()
    tied = Run(tmp_path / "run", "1f1b", 1, model={"tied": True})
    with pytest.raises(MaterializeError, match="are one tied weight, and the run has kept two"):
        tied.saved.resume()
    with pytest.raises(RuntimeFault, match="before resume"):
        tied.saved.train()
    tied.saved.close()
    other = Run(tmp_path / "run", "1f1b", 2, model={"context": 64})
    with pytest.raises(MaterializeError, match=r"and the run has torch.float64 \["):
        other.saved.resume()
    other.saved.close()
    with pytest.raises(RuntimeFault, match="multiple of `every`"):
        Run(tmp_path / "second", "1f1b", 2, every=2, durable=3)
    with pytest.raises(RuntimeFault, match="no spare has started this process"):
        Run(tmp_path / "second", "1f1b", 2, spares=1)


@pytest.mark.slow
def test_a_tied_weight_is_read_by_each_of_its_names(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "1f1b", 1, model={"tied": True})
    run.train(1)
    run.saved.close()
    expected, stored = run.pipe.full_state_dict(), open_checkpoint(tmp_path / "run")
    assert stored.keys() == expected.keys()
    again = Run(tmp_path / "again", "1f1b", 2, model={"tied": True})
    with torch.no_grad():
        for parameter in again.pipe.parameters():
            parameter.zero_()
    again.pipe.materialize(checkpoint=tmp_path / "run")
    state = again.pipe.full_state_dict()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
    again.saved.close()


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "1f1b", 2)
    run.train(2)
    with torch.no_grad():
        next(iter(run.pipe.parameters())).fill_(float("nan"))
    with pytest.raises(RuntimeFault, match="the loss is nan"):
        run.saved.train(*next(run.batches))
    again = Run(tmp_path / "run", "1f1b", 2)
    assert again.saved.resume() == 1
    again.saved.close()


def test_memory_that_is_too_small_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(RuntimeFault, match="GB left") as refused:
        Run(tmp_path / "run", "1f1b", 2, memory=tmp_path)
    assert "--shm-size" in str(refused.value)
    assert not list(tmp_path.glob("schedc-*/rank-*"))
    assert "Checkpoints(memory=...)" in too_small(tmp_path, 1).help


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Places.of_run(tmp_path, "whole").folder.rmdir()
    folder = Places.of_run(tmp_path, "open").folder
    folder.chmod(0o777)
    with pytest.raises(RuntimeFault, match="no folder of this user alone"):
        Places.of_run(tmp_path, "open")
    folder.chmod(0o700)
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RuntimeFault, match="no folder of this user alone"):
        Places.of_run(tmp_path, "open")


def test_an_image_without_its_header_holds_nothing(tmp_path: Path) -> None:
    """Every byte of a header counts, and so does every byte of the description."""
    image = Image.made(tmp_path / "image", 1 << 16)
    assert image.header() is None
    image.finish(1, 7, True, 64, b"{}")
    header = image.header()
    assert header is not None
    assert (header.step, header.durable, image.description(header)) == (7, True, {})
    file = bytearray((tmp_path / "image").read_bytes())
    for place in range(80):
        (tmp_path / "image").write_bytes(file[:place] + bytes([file[place] ^ 1]) + file[place + 1 :])
        assert image.header() is None, place
    (tmp_path / "image").write_bytes(file)
    image.finish(1, 7, True, 1 << 16, b"")
    assert image.header() is None, "it would end behind the file"


@pytest.mark.parametrize("value", [1, "a", float("inf"), [1, (2.5, None)], {"a": {3: b"x"}}, {"tensor": True}])
def test_further_states_come_back(value: object) -> None:
    assert unpacked(packed({"own": value}, lambda _: "", "it"), lambda _: torch.zeros(())) == {"own": value}


def test_a_state_that_is_no_data_is_refused() -> None:
    with pytest.raises(RuntimeFault, match=r"it\['a'\]\[1\] is a PosixPath, which a checkpoint cannot hold"):
        packed({"a": [1, Path()]}, lambda _: "", "it")
