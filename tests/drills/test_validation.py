"""Validation in the middle of training changes nothing in it."""

from pathlib import Path

from commands import run
from drill_runs import SMALL, losses_of, result_of


def test_training_with_and_without_validation_is_the_same(straight: Path) -> None:
    outcome = run(straight, *SMALL, "name=unvalidated", "train.validate_every_steps=null")
    assert outcome.exit_code == 0, outcome.output
    without, with_it = losses_of(straight, "unvalidated"), losses_of(straight, "straight")
    assert ("val/loss", 20) in with_it and ("val/loss", 20) not in without
    train = {key: loss for key, loss in with_it.items() if key[0] == "train/loss"}
    assert len(train) == 25
    assert {key: loss for key, loss in without.items() if key[0] == "train/loss"} == train
    assert result_of(straight, "unvalidated")["weights_sha256"] == result_of(straight, "straight")["weights_sha256"]
