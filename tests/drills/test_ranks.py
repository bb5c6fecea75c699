"""One rank, accumulation and several ranks are the same run: the same loss curve up to rounding, with dropout on."""

from pathlib import Path

import pytest
from commands import run, start, succeed
from drill_runs import SMALL, folder_of, losses_of, result_of

TOLERANCE = 1e-4


def assert_same_curve(root: Path, name: str) -> None:
    curve, expected = losses_of(root, name), losses_of(root, "straight")
    assert curve.keys() == expected.keys() and ("train/loss", 50) in curve
    for key, loss in expected.items():
        assert curve[key] == pytest.approx(loss, rel=TOLERANCE), key
    assert result_of(root, name)["progress/tokens"] == result_of(root, "straight")["progress/tokens"]


def test_accumulation_and_two_ranks_give_the_curve_of_one_rank(straight: Path) -> None:
    succeed(
        start(straight, *SMALL, "name=accumulated", "train.accumulate=2"),
        start(straight, *SMALL, "name=pair", "cluster.devices=2"),
    )
    assert_same_curve(straight, "accumulated")
    assert_same_curve(straight, "pair")
    assert result_of(straight, "pair")["ranks"] == 2


def test_what_rank_zero_finds_wrong_is_one_line_and_leaves_no_files(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    outcome = run(straight, *SMALL, "name=wrong", "cluster.devices=2", "data.vocab_size=60000")
    assert outcome.exit_code == 1
    [said] = [line for line in outcome.output.splitlines() if not line.startswith("preparing")]
    assert said.startswith("error: data.vocab_size=60000 is too large for this corpus")
    assert not [*tmp_path.glob("torchelastic_*"), *tmp_path.glob("reprise_ranks_*")]


@pytest.mark.slow
def test_torchrun_is_the_same_run_as_our_own_ranks(straight: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    outcome = run(straight, *SMALL, "name=torchrun", launcher=torchrun)
    assert outcome.exit_code == 0, outcome.output
    assert_same_curve(straight, "torchrun")
    [ours] = succeed(start(straight, *SMALL, "name=torchrun", "cluster.devices=2"))
    assert f"{folder_of(straight, 'torchrun')} is finished" in ours.output


@pytest.mark.slow
def test_more_ranks_than_lanes_of_evaluation(straight: Path) -> None:
    words = (*SMALL, "data.eval_lanes=1", "train.max_steps=4", "train.validate_every_steps=2")
    succeed(start(straight, *words, "name=lone"), start(straight, *words, "name=lone_pair", "cluster.devices=2"))
    for score in ("val/loss", "test/loss", "test/bpb"):
        assert result_of(straight, "lone_pair")[score] == pytest.approx(result_of(straight, "lone")[score], rel=1e-5)
