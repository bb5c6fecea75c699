"""Every file under conf/ composes, a mistake is one line with its key, a digest is of what can change a result."""

from pathlib import Path

import pytest
import torch
from commands import CONF, Outcome, compose, finish, settings, start, told

from reprise import config, jobs
from reprise.config import Config
from reprise.runtime import UserError, World

# What a command has to give beside the option itself.
NEEDED = {
    "data=ptb": ("data.path=somewhere",),
    "data=files": ("data.source=somewhere.txt",),
    # No task that predicts the next token takes it.
    "model/cell=transformer_encoder": ("task=report",),
}

# Keys that commands, sweeps and records rely on.
FIXED_KEYS = (
    "seed",
    "name",
    "fresh",
    "paths.root",
    "prompt",
    "runs",
    "train.max_steps",
    "train.max_tokens",
    "train.max_minutes",
    "train.accumulate",
    "train.clip_norm",
    "train.log_every_steps",
    "train.validate_every_steps",
    "data.path",
    "data.source",
    "data.num_lanes",
    "data.window",
    "data.vocab_size",
    "model.num_layers",
    "model.width",
    "model.dropout",
    "model.tie_embeddings",
    "model.cell.coupled_gates",
    "model.cell.layer_norm",
    "model.cell.temporal_residual",
    "model.cell.recurrence",
    "model.cell.implementation",
    "optim.lr",
    "optim.weight_decay",
    "schedule.warmup_steps",
    "schedule.final_lr_fraction",
    "cluster.devices",
    "cluster.nodes",
    "cluster.precision",
    "cluster.strategy",
    "checkpoint.load",
    "checkpoint.every_steps",
    "checkpoint.every_minutes",
    "checkpoint.keep_latest",
    "prepare.on_corrupt",
)


def options() -> list[str]:
    files = [file.relative_to(CONF) for file in sorted(CONF.rglob("*.yaml"))]
    return [f"{file.parent}={file.stem}" for file in files if file.parent != Path(".")]


@pytest.mark.parametrize("option", options())
def test_every_option_composes_and_passes_its_checks(option: str) -> None:
    loaded = settings(option, *NEEDED.get(option, ()), *(("data.path=x",) if "ptb" in option else ()))
    assert isinstance(loaded, Config)
    assert loaded.digest()


def test_config_yaml_holds_the_defaults_list_and_nothing_else() -> None:
    lines = (CONF / "config.yaml").read_text().splitlines()
    assert lines[0] == "defaults:" and all(line.startswith("  ") for line in lines[1:] if line)


@pytest.mark.parametrize("key", FIXED_KEYS)
def test_fixed_keys_are_there(key: str) -> None:
    assert key in config.all_keys()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("optim.lrr=1", "optim.lrr: no such key; did you mean optim.lr?"),
        ("+optim.lrr=1", "optim.lrr: no such key; did you mean optim.lr?"),
        ("++optim.lrr=1", "optim.lrr: no such key; did you mean optim.lr?"),
        ("trian.max_steps=3", "trian.max_steps: no such key; did you mean train.max_steps?"),
        ("lr=3", "lr: no such key; did you mean optim.lr?"),
        ("+model.cell.kindd=gru", "model.cell.kindd: no such key; did you mean model.cell.kind?"),
        ("optim.lr=abc", "optim.lr=abc: not of the right type, Float expected"),
        ("optim={lr: abc}", "optim={lr: abc}: not of the right type, Float expected"),
        ("model.width=1.5", "model.width=1.5: not of the right type, Integer expected"),
        ("data.num_lanes=null", "data.num_lanes=null: "),
        ("fresh=maybe", "fresh=maybe: "),
        ("optim.betas=[a,b]", "optim.betas=[a,b]: not of the right type, Float expected"),
        ("model/cell=lstmm", "model/cell=lstmm: no such option; did you mean lstm?"),
        ("data=sotuu", "data=sotuu: no such option; did you mean sotu?"),
        ("debug=smokee", "debug=smokee: no such option; did you mean smoke?"),
        ("task=evalute", "task=evalute: no such option; did you mean evaluate?"),
        ("task.name=guess", "task.name=guess: one of prepare, pretrain"),
        ("optim.lr=-1", "optim.lr=-1.0: more than 0"),
        ("train.accumulate=0", "train.accumulate=0: more than 0"),
        ("checkpoint.keep_latest=0", "checkpoint.keep_latest=0: more than 0"),
        ("schedule.kind=linear", "schedule.kind=linear: one of cosine, wsd, constant"),
        ("cluster.precision=fp8", "cluster.precision=fp8: one of "),
        ("cluster.timeout_s=0", "cluster.timeout_s=0.0: more than 0"),
        ("model.dropout=1", "model.dropout=1.0: "),
        ("generate.top_p=0", "generate.top_p=0.0: "),
        ("logger.wandb_mode=loud", "logger.wandb_mode=loud: one of offline, online, disabled"),
        ("seed=-1", "seed=-1: at least 0"),
        ("name=a/b", "name='a/b': "),
        ("checkpoint.load=runs/nowhere", "checkpoint.load=runs/nowhere: no such run folder or checkpoint file"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(words: str, line: str) -> None:
    message = told(words)
    assert message.startswith(line)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train.max_steps=null", "train.max_minutes=null"), "train.max_steps=null: set at least one of"),
        (("data.num_lanes=3", "train.accumulate=2", "cluster.devices=2"), "data.num_lanes=3: fewer than one lane"),
        (("data.source=a.txt", "data.path=b"), "data.source=a.txt and data.path=b: only one"),
        (("model/cell=gru", "model.cell.coupled_gates=true"), "model.cell.coupled_gates=true: a gru has no"),
        (("model.cell.implementation=library",), "model.cell.implementation=library: the library has no"),
        (("model/cell=block_lstm", "model.width=90"), "model.cell.num_heads=4: does not divide model.width=90"),
        (("model/cell=transformer_encoder",), "model.cell.kind=transformer_encoder: hears the token that"),
        (("model/cell=transformer", "model.width=90"), "model.cell.num_heads=4: does not divide model.width=90"),
        (("model/cell=transformer", "model.layer_residual=true"), "model.layer_residual=true: a transformer adds"),
        (("model/cell=transformer", "model.cell.implementation=eager"), "model.cell.implementation=eager: a transf"),
    ],
)  # fmt: skip
def test_settings_that_exclude_each_other_are_refused(words: tuple[str, ...], line: str) -> None:
    message = told(*words)
    assert message.startswith(line)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train=five_minutes", "train.max_steps=abc"), "train.max_steps=abc: not of the right type"),
        (("sweep=cells", "optim.lrr=1"), "optim.lrr: no such key"),
        (("sweep=cells", "hydra.sweeper.paramz=1"), "Could not override 'hydra.sweeper.paramz'"),
    ],
)
def test_a_mistake_is_not_put_on_another_word_of_the_command(words: tuple[str, ...], line: str) -> None:
    assert told(*words).startswith(line)


@pytest.mark.parametrize(("option", "devices"), [("one_gpu", 1), ("gpus", 8)])
def test_gpus_that_are_not_there_are_missed_before_any_work(
    option: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices - 1)
    assert told(f"cluster={option}").startswith(f"cluster.accelerator=gpu: {devices - 1} GPUs here")
    assert told(f"cluster={option}", "task=report") == ""
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    assert told(f"cluster={option}") == ""


def test_a_rank_refuses_to_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="no torchrun"):
        jobs.start(compose("debug=smoke"), ["debug=smoke"], command="run.py", sweep=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_command_without_mistakes_is_told_nothing() -> None:
    assert told() == ""
    assert told("debug=smoke", "model/cell=gru", "optim.lr=1e-3", "train.max_tokens=1000000") == ""


def test_a_run_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert told(f"checkpoint.load={tmp_path}").startswith(f"checkpoint.load={tmp_path}: no whole checkpoint under")


@pytest.mark.parametrize(
    "words",
    [
        ("name=another",),
        ("fresh=true",),
        ("paths.root=/elsewhere",),
        ("logger=tensorboard",),
        ("logger=wandb",),
        ("train.log_every_steps=3",),
        ("train.validate_every_steps=7",),
        ("checkpoint.every_steps=5", "checkpoint.every_minutes=null", "checkpoint.keep_latest=9"),
        ("prompt=hello",),
        ("generate.temperature=0",),
        ("runs=elsewhere/*",),
        ("prepare.num_threads=1",),
    ],
)
def test_digest_passes_over_what_changes_no_number(words: tuple[str, ...]) -> None:
    assert settings(*words).digest() == settings().digest()


def test_digest_sees_what_can_change_a_number() -> None:
    changes = (
        "seed=2",
        "optim.lr=1e-4",
        "optim=sgd",
        "schedule.warmup_steps=1",
        "cluster.devices=2",
        "cluster.precision=16-mixed",
        "train.max_steps=7",
        "train.max_minutes=1",
        "train.accumulate=2",
        "train.clip_norm=null",
        "train.num_threads=1",
        "train.label_smoothing=0.1",
        "train.z_loss=1e-4",
        "model/cell=gru",
        "model/cell=block_lstm",
        "model/cell=diagonal_lstm",
        "model/cell=transformer",
        "model.width=64",
        "model.dropout=0.1",
        "data.window=16",
        "data.num_lanes=16",
        "data.vocab_size=512",
        "data.eval_lanes=1",
        "data=pydoc",
        "prepare.on_corrupt=salvage",
        "task=evaluate",
    )
    digests = [settings(change).digest() for change in changes]
    assert len({*digests, settings().digest()}) == len(changes) + 1


def test_tasks_pass_over_the_sections_they_do_not_read() -> None:
    assert settings("task=prepare", "optim.lr=1").digest() == settings("task=prepare").digest()
    assert settings("task=prepare", "data.vocab_size=300").digest() != settings("task=prepare").digest()
    assert settings("task=generate", "prompt=a").digest() != settings("task=generate").digest()
    assert settings("task=report", "runs=a").digest() != settings("task=report").digest()
    assert settings("task=report", "seed=5", "model.width=8").digest() == settings("task=report").digest()


@pytest.mark.parametrize("vocab_size", [512, 4_096, 32_768])
@pytest.mark.parametrize("size", ["tiny", "small", "medium", "large"])
def test_one_override_gives_a_transformer_with_as_many_parameters(size: str, vocab_size: int) -> None:
    with torch.device("meta"):
        recurrent, transformer = (
            settings(f"model/size={size}", *words).model.build(vocab_size=vocab_size).num_parameters()
            for words in ((), ("model/cell=transformer",))
        )
    assert transformer == pytest.approx(recurrent, rel=0.02)


def test_reference_size_is_that_of_the_field() -> None:
    model = settings("model/size=reference", "model/cell=transformer").model
    assert (model.num_layers, model.width, model.cell.num_heads, model.embedding_width) == (12, 768, 12, None)
    with torch.device("meta"):
        built = model.build(vocab_size=50_257)
        layers = torch.nn.TransformerEncoderLayer(768, 12, 4 * 768), torch.nn.LayerNorm(768)
    layer, norm = (sum(part.numel() for part in module.parameters()) for module in layers)
    assert built.num_parameters() == 12 * layer + norm + 50_257 * 768 + 50_257


def test_the_folder_of_a_run_is_its_name_and_digest(tmp_path: Path) -> None:
    loaded = settings(f"paths.root={tmp_path}", "name=trial")
    assert loaded.run_folder().path == tmp_path / "runs" / "trial" / loaded.digest()
    assert loaded.prepared_root() == tmp_path / "prepared"


def test_derived_numbers() -> None:
    shape = ("data.num_lanes=8", "data.window=32", "train.max_minutes=null")
    by_tokens = settings(*shape, "train.max_steps=null", "train.max_tokens=1000")
    assert by_tokens.tokens_per_step() == 256
    assert by_tokens.planned_steps() == 3
    assert settings(*shape, "train.max_steps=2", "train.max_tokens=1000").planned_steps() == 2
    assert settings(*shape, "train.max_steps=null", "train.max_tokens=1").planned_steps() == 1
    assert settings("train.max_steps=null", "train.max_minutes=1").planned_steps() is None


def test_the_ranks_an_agent_started_count(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = settings("cluster.devices=2").digest()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert World.from_environment().size == 2
    loaded = settings()
    assert (loaded.cluster.devices, loaded.cluster.nodes) == (2, 1)
    assert loaded.digest() == launched


def test_the_command_line_ends_in_one_line_and_no_work(tmp_path: Path) -> None:
    expected = {
        "optim.lrr=1": "error: optim.lrr: no such key; did you mean optim.lr?",
        "+optim.lrr=1": "error: optim.lrr: no such key; did you mean optim.lr?",
        "optim.lr=fast": "error: optim.lr=fast: not of the right type, Float expected",
        "checkpoint.load=runs/nowhere": "error: checkpoint.load=runs/nowhere: no such run folder or checkpoint file;"
        " give a run folder like runs/<name>/<digest>",
    }
    started = {word: start(tmp_path, word) for word in expected}
    for word, process in started.items():
        assert finish(process) == Outcome(1, expected[word] + "\n")
    assert not list(tmp_path.rglob("metrics.csv")) and not list(tmp_path.rglob("*.ckpt"))
    assert not (tmp_path / "prepared").exists()


def test_a_saved_config_of_another_version_is_refused_by_its_file(tmp_path: Path) -> None:
    for content, reason in {"optim: {lrr: 1}": "lrr", "optim: {kind: lion}": "optim.kind=lion: one of adamw"}.items():
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(UserError) as caught:
            config.load_saved(tmp_path)
        line = str(caught.value)
        assert line.startswith(f"{tmp_path / 'config.yaml'}: written by another version") and "\n" not in line
        assert reason in line and line.endswith(f"{tmp_path / 'environment.txt'} names its commit")


def test_a_loaded_run_keeps_what_the_command_does_not_name() -> None:
    saved, own = (
        settings("data=ptb", "data.path=elsewhere"),
        settings("data.eval_lanes=2", "model.cell.layer_norm=false"),
    )
    words = ["data.eval_lanes=2", "model.cell.layer_norm=false"]
    data = config.said_of("data", saved.data, own.data, words)
    assert (data.corpus, data.path, data.eval_lanes) == ("ptb", "elsewhere", 2)
    model = config.said_of("model", saved.model, own.model, words)
    assert model.cell.coupled_gates and not model.cell.layer_norm
    assert saved.model.cell.layer_norm and saved.data.eval_lanes == 1
    assert config.said_of("data", saved.data, own.data, ["data=sotu"]) == own.data
    assert config.said_of("data", saved.data, own.data, ["task=evaluate"]) == saved.data
