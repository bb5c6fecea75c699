"""Ranks, the run folder and its lock, atomic writes, digests, and the log of rank 0."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise import runtime
from reprise.runtime import RunFolder, UserError, World, digest_of, from_rank_zero, is_rank, say, write_atomically


def test_a_process_without_an_agent_is_a_world_of_one() -> None:
    assert World.from_environment() == World(rank=0, size=1, local_rank=0, local_size=1)
    assert World().num_nodes == 1
    assert not is_rank()


def test_a_rank_reads_its_place_from_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    world = World.from_environment()
    assert world == World(rank=5, size=8, local_rank=1, local_size=4)
    assert world.num_nodes == 2
    assert is_rank()


@pytest.mark.parametrize(("rank", "heard"), [(None, "hello\n"), ("0", "hello\n"), ("1", ""), ("7", "")])
def test_only_rank_zero_speaks(
    rank: str | None, heard: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    say("hello")
    assert capsys.readouterr().out == heard


def test_one_rank_decides_for_itself() -> None:
    assert from_rank_zero(lambda: {"step": 3}, World()) == {"step": 3}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the signal for it")
def test_a_rank_lives_as_long_as_its_launcher_whatever_number_that_has() -> None:
    words = [sys.executable, "-c", "from reprise.runtime import end_with_launcher as end; end(); print('alive')"]
    # The launcher is the parent; any other number is one that is gone, and the rank has got another parent.
    for launcher, output, exit_code in ((os.getpid(), "alive\n", 0), (1, "", -signal.SIGKILL)):
        environment = os.environ | {runtime.LAUNCHED: str(launcher)}
        ended = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert (ended.stdout, ended.returncode) == (output, exit_code)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def reversed_keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(list(value))}
    if isinstance(value, list):
        return [reversed_keys(item) for item in value]
    return value


@given(st.dictionaries(st.text(), PLAIN, max_size=5))
def test_digest_does_not_see_the_order_of_keys(settings: dict[str, object]) -> None:
    turned = reversed_keys(settings)
    assert isinstance(turned, dict)
    assert digest_of(settings) == digest_of(turned)


def test_digest_sees_every_value() -> None:
    digests = {
        digest_of(settings)
        for settings in ({"a": 1}, {"a": 2}, {"a": "1"}, {"a": None}, {"b": 1}, {"a": [1, 2]}, {"a": [2, 1]}, {})
    }
    assert len(digests) == 8
    assert all(len(digest) == 12 for digest in digests)


def test_atomic_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "first, and rather long\n")
    write_atomically(path, "second\n")
    assert path.read_text() == "second\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old\n")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new\n")
    assert path.read_text() == "old\n"


def test_run_folder_gives_back_its_result(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.result() is None
    run.write_result({"val/loss": 1.5, "task": "pretrain"})
    assert run.result() == {"val/loss": 1.5, "task": "pretrain"}
    assert run.checkpoints == tmp_path / "checkpoints" and run.metrics == tmp_path / "metrics.csv"


def test_events_are_appended_by_rank_zero_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    run.event("start", step=0)
    run.event("checkpoint", step=5)
    monkeypatch.setenv("RANK", "1")
    run.event("start", step=9)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("start", 0), ("checkpoint", 5)]


HOLDER = """
import sys
from pathlib import Path
from reprise.runtime import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_written_by_one_process_and_free_when_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdin is not None
    run = RunFolder(tmp_path)
    try:
        assert holder.stdout.readline() == "held\n"
        with monkeypatch.context() as patched:
            patched.setattr(runtime.time, "sleep", lambda seconds: None)
            with pytest.raises(UserError, match="another process is running this very run"), run.locked():
                pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    with run.locked():
        pass
    with run.locked():
        pass


def test_environment_names_what_is_needed_to_repeat_a_run() -> None:
    text = runtime.environment_text()
    for word in ("command", "commit", "machine", "torch", "lightning", "python"):
        assert word in text
    assert runtime.package_versions()["torch"] != "absent"
