"""A checkpoint is whole or is not there: kills, full disks and changed bytes never cost the one before."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.models import LanguageModel
from reprise.runtime import UserError
from reprise.training import checkpoint as checkpoints
from reprise.training.checkpoint import (
    BrokenCheckpoint,
    CheckpointConfig,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_whole_checkpoint,
    save_checkpoint,
    weights_sha256,
)
from reprise.training.weights import read_weights


def contents(step: int) -> dict[str, Any]:
    return {"global_step": step, "weights": torch.arange(1000.0) + step, "plain": {"list": [1, "two", None]}}


def save(folder: Path, step: int, keep_latest: int = 2) -> Path:
    return save_checkpoint(contents(step), folder, step=step, keep_latest=keep_latest)


def steps(folder: Path) -> list[int]:
    return [file.step for file in list_checkpoints(folder)]


def break_file(path: Path) -> None:
    """Change one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 12)
    assert path.name.startswith("step_00000012-") and path.suffix == ".ckpt"
    loaded = load_checkpoint(path)
    assert loaded["global_step"] == 12 and loaded["plain"] == {"list": [1, "two", None]}
    assert torch.equal(loaded["weights"], contents(12)["weights"])
    assert os.listdir(path.parent) == [path.name]


def test_only_the_latest_are_kept_and_the_newest_is_first(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep_latest=3)
    assert steps(tmp_path) == [20, 15, 10]
    save(tmp_path, 25, keep_latest=1)
    assert steps(tmp_path) == [25]


def test_a_broken_newest_falls_back_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 10)
    broken = save(tmp_path, 20)
    break_file(broken)
    newest = newest_whole_checkpoint(tmp_path)
    assert newest is not None and newest.step == 10
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and broken.name in said[0] and "falling back" in said[0]
    with pytest.raises(BrokenCheckpoint):
        load_checkpoint(broken)


def test_a_cut_off_file_is_broken_too(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    path.write_bytes(path.read_bytes()[:-1])
    assert newest_whole_checkpoint(tmp_path) is None


@pytest.mark.parametrize("keep_latest", [1, 2])
def test_a_broken_newer_file_never_outlives_a_whole_one(tmp_path: Path, keep_latest: int) -> None:
    """The run fell back to step 10 and goes on: what it saves is kept, the broken file of a later step is not."""
    save(tmp_path, 10)
    break_file(save(tmp_path, 30))
    save(tmp_path, 20, keep_latest=keep_latest)
    newest = newest_whole_checkpoint(tmp_path)
    assert newest is not None and newest.step == 20
    save(tmp_path, 30, keep_latest=keep_latest)
    newest = newest_whole_checkpoint(tmp_path)
    assert newest is not None and newest.step == 30
    assert steps(tmp_path) == [30, 20][:keep_latest]


WRITER = """
import sys, torch
from pathlib import Path
from reprise.training.checkpoint import save_checkpoint
class Slow(dict):
    pass
real_save = torch.save
def slow_save(contents, file):
    real_save(contents, file)
    file.flush()
    print("written", flush=True)
    sys.stdin.read()
torch.save = slow_save
save_checkpoint({"weights": torch.zeros(5000)}, Path(sys.argv[1]), step=20, keep_latest=1)
"""


def test_a_kill_during_a_save_leaves_the_old_one(tmp_path: Path) -> None:
    old = save(tmp_path, 10)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None and writer.stdin is not None
    assert writer.stdout.readline() == "written\n"
    writer.kill()
    writer.wait()
    writer.stdin.close()
    writer.stdout.close()
    assert list(tmp_path.glob(".writing-*"))
    assert steps(tmp_path) == [10]
    assert newest_whole_checkpoint(tmp_path) == list_checkpoints(tmp_path)[0]
    assert load_checkpoint(old)["global_step"] == 10
    save(tmp_path, 15)
    assert not list(tmp_path.glob(".writing-*"))


@pytest.mark.parametrize("place", ["os.replace", "os.fsync", "torch.save"])
def test_a_save_that_fails_says_so_and_keeps_the_old_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    before = sorted(os.listdir(tmp_path))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    owner, _, name = place.partition(".")
    monkeypatch.setattr(getattr(checkpoints, owner), name, fail)
    with pytest.raises(OSError, match="checkpoint of step 20 not saved, .* MiB free: .*No space left") as caught:
        save(tmp_path, 20)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir(tmp_path)) == before
    assert newest_whole_checkpoint(tmp_path) is not None


LIMITED = """
import resource, sys, torch
from pathlib import Path
from reprise.training.checkpoint import save_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    save_checkpoint({"weights": torch.zeros(100000)}, Path(sys.argv[1]), step=20, keep_latest=1)
except OSError as error:
    print(error)
"""


def test_a_file_that_may_not_grow_keeps_the_old_one_and_leaves_no_part(tmp_path: Path) -> None:
    """torch's writer turns a full disk into an error of its own; a file-size limit fails in the same place."""
    save(tmp_path, 10)
    before = sorted(os.listdir(tmp_path))
    ended = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "checkpoint of step 20 not saved" in ended.stdout
    assert sorted(os.listdir(tmp_path)) == before


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (marker,))

    path = tmp_path / "step.ckpt"
    torch.save({"attack": Attack()}, path)
    with pytest.raises(UserError, match="not a whole checkpoint of this project"):
        read_weights(path, {})
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"hello there", b"PK\x03\x04 and no more", b"\x80\x02."])
def test_another_kind_of_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="notes.txt: not a whole checkpoint .*; give a run folder") as caught:
        read_weights(path, {})
    assert "\n" not in str(caught.value)


def test_find_means_a_file_or_the_newest_of_a_run(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 10)
    newest = save(tmp_path / "checkpoints", 20)
    assert find_checkpoint(str(tmp_path)) == newest
    assert find_checkpoint(str(newest)) == newest
    break_file(newest)
    assert find_checkpoint(str(tmp_path)).name.startswith("step_00000010-")
    with pytest.raises(UserError, match="checkpoint.load=/nowhere: no such run .*; give a run folder"):
        find_checkpoint("/nowhere")


def test_weights_digest_is_of_every_byte_and_of_nothing_else(make_model: Callable[..., LanguageModel]) -> None:
    first, second = make_model(50), make_model(50)
    digest = weights_sha256(first)
    assert weights_sha256(second) == digest
    assert weights_sha256(first.eval()) == digest
    with torch.no_grad():
        second.output_bias[3] = torch.nextafter(second.output_bias[3], torch.tensor(1.0))
    assert weights_sha256(second) != digest


def test_config_refuses_by_name() -> None:
    with pytest.raises(UserError, match="checkpoint.every_steps=0: more than 0"):
        CheckpointConfig(every_steps=0)
