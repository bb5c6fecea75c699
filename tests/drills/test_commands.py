"""The commands a user gives to a finished run, and ways to stop one and go on."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from commands import Outcome, finish, run, start, succeed
from drill_runs import SMALL, events_of, folder_of, losses_of, result_of

SCORES = ("val/loss", "val/ppl", "val/bpb", "test/loss", "test/ppl", "test/bpb")
EVALUATE = ("task=evaluate", "cluster.precision=32-true")


def test_a_run_leaves_what_a_reader_needs(straight: Path) -> None:
    folder = folder_of(straight, "straight")
    names = {entry.name for entry in folder.iterdir()}
    assert {
        "config.yaml",
        "overrides.txt",
        "environment.txt",
        "metrics.csv",
        "events.jsonl",
        "checkpoints",
        "result.json",
    } <= names
    result = result_of(straight, "straight")
    assert result["task"] == "pretrain" and result["config_digest"] == folder.name
    assert result["device"] == "cpu" and result["precision"] == "32-true" and result["ranks"] == 1
    assert result["progress/step"] == 50 and result["progress/tokens"] == 50 * 8 * 32
    assert result["test/bpb"] > 0 and result["sample"] and len(result["weights_sha256"]) == 64
    assert result["perf/tokens_per_s"] > 0 and 0.1 < result["mem/max_resident_gib"] < 100
    assert "torch" in result["versions"]
    assert "model.dropout=0.2" in (folder / "overrides.txt").read_text().splitlines()
    assert [path.name[:13] for path in sorted((folder / "checkpoints").iterdir())] == ["step_00000040", "step_00000050"]
    assert losses_of(straight, "straight")["train/loss", 2] > losses_of(straight, "straight")["train/loss", 50]


def test_evaluation_gives_the_scores_of_the_run(straight: Path) -> None:
    succeed(start(straight, *EVALUATE, f"checkpoint.load={folder_of(straight, 'straight')}", "name=scores"))
    trained, scores = result_of(straight, "straight"), result_of(straight, "scores")
    assert scores["weights_sha256"] == trained["weights_sha256"]
    assert {name: scores[name] for name in SCORES} == pytest.approx({name: trained[name] for name in SCORES}, rel=1e-9)


@pytest.mark.slow
def test_evaluation_on_two_ranks_gives_the_same_scores(straight: Path) -> None:
    load = f"checkpoint.load={folder_of(straight, 'straight')}"
    succeed(start(straight, *EVALUATE, load, "name=scores_pair", "cluster.devices=2"))
    trained, pair = result_of(straight, "straight"), result_of(straight, "scores_pair")
    assert pair["ranks"] == 2
    assert {name: pair[name] for name in SCORES} == pytest.approx({name: trained[name] for name in SCORES}, rel=1e-6)


def test_generation_repeats_itself_and_a_report_draws_the_run(straight: Path) -> None:
    load = f"checkpoint.load={folder_of(straight, 'straight')}"
    generated, report = succeed(
        start(straight, "task=generate", load, "prompt='The value of'", "generate.num_tokens=20", "name=text"),
        start(straight, "task=report", f"runs={straight}/runs/straight"),
    )
    text = result_of(straight, "text")["text"]
    assert text and f"\nThe value of{text}" in generated.output
    # The sample of the run was drawn with the same seed; the end of a character may be missing from either.
    assert f"The value of{text}".rstrip("\ufffd") == result_of(straight, "straight")["sample"].rstrip("\ufffd")
    folder = folder_of(straight, "report")
    files = [Path(file) for file in result_of(straight, "report")["files"]]
    assert {"loss.png", "perplexity.png", "curves.csv"} <= {file.name for file in files}
    assert all(file.parent == folder and file.stat().st_size > 0 and str(file) in report.output for file in files)


def test_the_same_command_again_says_finished_and_fresh_starts_over(straight: Path) -> None:
    source = folder_of(straight, "straight")
    for name in ("again", "fresh"):
        shutil.copytree(source, straight / "runs" / name / source.name)
    again, fresh = succeed(
        start(straight, *SMALL, "name=again"),
        start(straight, *SMALL, "name=fresh", "fresh=true"),
    )
    assert f"{folder_of(straight, 'again')} is finished" in again.output and "step 2/50" not in again.output
    assert (folder_of(straight, "again") / "result.json").read_text() == (source / "result.json").read_text()
    assert "step 2/50" in fresh.output
    assert (folder_of(straight, "fresh") / "result.json").read_text() != (source / "result.json").read_text()
    assert result_of(straight, "fresh")["weights_sha256"] == result_of(straight, "straight")["weights_sha256"]
    assert losses_of(straight, "fresh") == losses_of(straight, "straight")
    assert events_of(straight, "fresh").count("start") == 1


def stop(root: Path, name: str, *words: str, number: signal.Signals) -> Outcome:
    """Start a run, and tell it to stop once it has trained a few steps."""
    process = start(root, *SMALL, f"name={name}", "train.validate_every_steps=5", *words)
    metrics = root / "runs" / name
    while process.poll() is None and not any(
        file.read_text().count("\n") > 2 for file in metrics.glob("*/metrics.csv")
    ):
        time.sleep(0.002)
    process.send_signal(number)
    return finish(process)


@pytest.mark.parametrize(
    ("name", "words", "number"),
    [
        ("stopped", (), signal.SIGTERM),
        pytest.param("stopped_pair", ("cluster.devices=2",), signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("stopped_by_hand", (), signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on(
    straight: Path, name: str, words: tuple[str, ...], number: signal.Signals
) -> None:
    stopped = stop(straight, name, *words, number=number)
    assert stopped.exit_code == 128 + number, stopped.output
    assert f"stopped by {number.name} after step" in stopped.output and "Traceback" not in stopped.output
    assert not (folder_of(straight, name) / "result.json").exists()
    assert list((folder_of(straight, name) / "checkpoints").glob("step_*.ckpt"))
    resumed = run(straight, *SMALL, f"name={name}", *words)
    assert resumed.exit_code == 0 and "resuming from step" in resumed.output
    if not words:
        assert result_of(straight, name)["weights_sha256"] == result_of(straight, "straight")["weights_sha256"]
        # Wherever the signal came, also between two log steps, every window is logged whole.
        whole, parts = losses_of(straight, "straight"), losses_of(straight, name)
        assert {key: value for key, value in whole.items() if key[0] == "train/loss"}.items() <= parts.items()
    assert result_of(straight, name)["test/loss"] == pytest.approx(
        result_of(straight, "straight")["test/loss"], rel=1e-4
    )


def test_trackers_work_offline_and_a_cpu_says_what_it_does_for_fp16(straight: Path) -> None:
    pytest.importorskip("tensorboard")
    home = straight / "home"
    home.mkdir()
    tiny = (*SMALL, "train.max_steps=4", "train.validate_every_steps=null")
    wandb, tensorboard = succeed(
        start(straight, *tiny, "name=wandb", "logger=wandb", home=home),
        start(straight, *tiny, "name=board", "logger=tensorboard", "cluster.precision=16-mixed"),
    )
    assert list((folder_of(straight, "wandb") / "wandb").glob("offline-run-*/*.wandb")), wandb.output
    assert losses_of(straight, "wandb")["train/loss", 4]
    assert list(folder_of(straight, "board").rglob("events.out.tfevents.*"))
    assert "cluster.precision=16-mixed: Lightning has no fp16" in tensorboard.output
    assert result_of(straight, "board")["precision"] == "bf16-mixed"


@pytest.mark.slow
def test_a_broken_newest_checkpoint_costs_only_its_steps(straight: Path) -> None:
    tiny = (*SMALL, "train.max_steps=12", "checkpoint.every_steps=4", "name=damaged")
    assert run(straight, *tiny).exit_code == 0
    folder = folder_of(straight, "damaged")
    expected = result_of(straight, "damaged")
    (folder / "result.json").unlink()
    newest = max((folder / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
    resumed = run(straight, *tiny)
    assert resumed.exit_code == 0
    assert "falling back to the one before" in resumed.output and "resuming from step 8" in resumed.output
    assert result_of(straight, "damaged")["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_by_the_setting(straight: Path) -> None:
    load = f"checkpoint.load={folder_of(straight, 'straight')}"
    outcome = run(straight, *SMALL, "name=other", "model.width=32", load)
    assert outcome.exit_code == 1
    assert "model.width=64" in outcome.output and "model.width=32" in outcome.output
    assert outcome.output.startswith("error: checkpoint.load=") and outcome.output.count("\n") == 1


@pytest.mark.slow
def test_minutes_end_a_run_and_it_lands(straight: Path) -> None:
    minutes = ("train.max_steps=null", "train.max_minutes=0.05", "train.validate_every_steps=null", "name=timed")
    outcome = run(straight, *SMALL, *minutes)
    assert outcome.exit_code == 0 and "train.max_minutes will run out first: annealing" in outcome.output
    assert "landing" in events_of(straight, "timed")
    result = result_of(straight, "timed")
    assert result["progress/step"] > 0 and json.dumps(result)


@pytest.mark.slow
def test_a_changed_text_is_another_run(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    lines = [f"The value of item {number} is {number * number}.\n" for number in range(4000)]
    text.write_text("".join(lines))
    words = (
        *SMALL,
        "train.max_steps=4",
        "train.validate_every_steps=null",
        f"data.source={text}",
        "data.vocab_size=315",
    )
    assert run(tmp_path, *words).exit_code == 0
    assert "is finished" in run(tmp_path, *words).output
    text.write_text("".join(reversed(lines)))
    changed = run(tmp_path, *words)
    assert changed.exit_code == 1 and "fresh=true starts over" in changed.output
    assert run(tmp_path, *words, "fresh=true").exit_code == 0
