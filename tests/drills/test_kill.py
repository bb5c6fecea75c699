"""A run killed at any moment, also while it saves, and started again ends with the weights of one that was not."""

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest
from commands import finish, start
from drill_runs import SMALL, folder_of, losses_of, result_of

# Many checkpoints for kills to hit, and validations that give them time; neither changes a number.
BUSY = (*SMALL, "checkpoint.every_steps=2", "train.validate_every_steps=2")
Wait = Callable[[Path, "Popen[str]"], None]


def during_a_save(checkpoints: Path, process: "Popen[str]") -> None:
    """Wait until a checkpoint is being written by this process."""
    known = set(checkpoints.glob(".writing-*"))
    while process.poll() is None and not set(checkpoints.glob(".writing-*")) - known:
        time.sleep(0.0002)


def at_a_random_moment(checkpoints: Path, process: "Popen[str]") -> None:
    """Wait for some time of training: a checkpoint that was not there, and a little more."""
    known = set(checkpoints.glob("step_*"))
    while process.poll() is None and not set(checkpoints.glob("step_*")) - known:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.3))


def kill_and_restart(root: Path, name: str, words: tuple[str, ...], *, waits: list[Wait]) -> tuple[int, int]:
    """Kill the run as often as `waits` says and more until one kill hit a save, then let it end.

    Returns:
        The kills, and those of them that left a half-written checkpoint.
    """
    hits, kills = 0, 0
    for wait in itertools.chain(waits, itertools.repeat(during_a_save, 5)):
        if kills >= len(waits) and hits:
            break
        process = start(root, *words, f"name={name}")
        while process.poll() is None and not (root / "runs" / name).exists():
            time.sleep(0.01)
        checkpoints = folder_of(root, name) / "checkpoints"
        before = set(checkpoints.glob(".writing-*"))
        wait(checkpoints, process)
        process.kill()
        code = finish(process).exit_code
        if code == 0:
            break
        kills += 1
        hits += len(set(checkpoints.glob(".writing-*")) - before)
    outcome = finish(start(root, *words, f"name={name}"))
    assert outcome.exit_code == 0, outcome.output
    return kills, hits


def assert_same_run(root: Path, name: str, as_name: str) -> None:
    assert result_of(root, name)["weights_sha256"] == result_of(root, as_name)["weights_sha256"]
    losses, expected = losses_of(root, name), losses_of(root, as_name)
    # The killed run validates more often; what both have must agree to the last bit.
    assert {key for key in losses if key[0] != "val/loss"} == {key for key in expected if key[0] != "val/loss"}
    assert {key: losses[key] for key in expected} == expected
    for score in ("test/loss", "val/loss", "progress/tokens", "train/loss"):
        assert result_of(root, name)[score] == result_of(root, as_name)[score]


@pytest.mark.parametrize("num_kills", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_kills_change_no_weight_and_no_loss(straight: Path, num_kills: int) -> None:
    name = f"killed_{num_kills}"
    waits: list[Wait] = [during_a_save, *[at_a_random_moment] * (num_kills - 1)]
    kills, hits = kill_and_restart(straight, name, BUSY, waits=waits)
    assert kills >= num_kills and hits >= 1
    assert_same_run(straight, name, "straight")


@pytest.mark.slow
def test_kills_change_no_weight_and_no_loss_on_two_ranks(straight: Path) -> None:
    words = (*BUSY, "cluster.devices=2", "train.accumulate=2")
    outcome = finish(start(straight, *words, "name=straight_pair", "train.validate_every_steps=10"))
    assert outcome.exit_code == 0, outcome.output
    kills, _ = kill_and_restart(straight, "killed_pair", words, waits=[at_a_random_moment] * 3)
    assert kills >= 3
    assert_same_run(straight, "killed_pair", "straight_pair")
