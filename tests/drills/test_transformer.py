"""A Transformer's run is a run like any other: killed and resumed, or spread over ranks, it is the same one."""

from pathlib import Path

import pytest
from commands import start, succeed
from drill_runs import SMALL, folder_of, losses_of, result_of
from test_kill import BUSY, assert_same_run, at_a_random_moment, during_a_save, kill_and_restart

# A cache of three windows and a half, so that what a checkpoint holds of it matters.
TRANSFORMER = ("model/cell=transformer", "model.cell.context=112")


@pytest.mark.slow
def test_kills_and_ranks_change_no_loss_and_the_run_can_be_asked(straight: Path) -> None:
    succeed(start(straight, *SMALL, *TRANSFORMER, "name=transformer"))
    kills, hits = kill_and_restart(
        straight, "transformer_killed", (*BUSY, *TRANSFORMER), waits=[during_a_save, at_a_random_moment]
    )
    assert kills >= 2 and hits >= 1
    assert_same_run(straight, "transformer_killed", "transformer")
    trained, load = result_of(straight, "transformer"), f"checkpoint.load={folder_of(straight, 'transformer')}"
    succeed(
        start(straight, *SMALL, *TRANSFORMER, "name=transformer_pair", "cluster.devices=2"),
        start(straight, "task=evaluate", "cluster.precision=32-true", load, "name=transformer_scores"),
        start(straight, "task=generate", load, "prompt='The value of'", "generate.num_tokens=20", "name=text_of_it"),
    )
    for key, loss in losses_of(straight, "transformer").items():
        assert losses_of(straight, "transformer_pair")[key] == pytest.approx(loss, rel=1e-4), key
    scores = result_of(straight, "transformer_scores")
    for name in ("val/loss", "test/loss"):
        assert scores[name] == pytest.approx(trained[name], rel=1e-9)
    text = f"The value of{result_of(straight, 'text_of_it')['text']}"
    assert text.rstrip("\ufffd") == trained["sample"].rstrip("\ufffd")
