"""The tasks, wired by hand in reading order."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from reprise.config import RANKED_TASKS, Config, TaskConfig, load, load_saved, open_run, said_of
from reprise.data.prepare import prepare as prepare_corpus
from reprise.data.shards import Corpus
from reprise.evaluation import report as reports
from reprise.evaluation.language import generate as generate_tokens
from reprise.evaluation.report import headline
from reprise.evaluation.sweep_table import SweepTable
from reprise.models import LanguageModel
from reprise.runtime import (
    UserError,
    World,
    as_plain,
    from_rank_zero,
    is_rank,
    join_world,
    launch_ranks,
    leave_world,
    package_versions,
    say,
)
from reprise.training import checkpoint as checkpoints
from reprise.training.budget import Budget
from reprise.training.recovery_state import check_same_text
from reprise.training.weights import identity, load_weights, model_identity, read_weights

if TYPE_CHECKING:
    from reprise.training.session import Settings

Result = dict[str, Any]


def prepare(config: Config, overrides: Sequence[str]) -> Result:
    """Text to token shards; a second call finds them and says so."""
    started = time.monotonic()
    corpus = prepare_corpus(config.data, config.prepare, config.prepared_root())
    with open_run(config, overrides, World()) as run:
        result = common_result(config, started) | {"folder": str(corpus.folder), "manifest": corpus.manifest}
        run.write_result(result)
    return result


def pretrain(config: Config, overrides: Sequence[str]) -> Result:
    """Train a language model and score it on validation and test text; resumes where an earlier command stopped."""
    from reprise.training import loggers, session

    started = time.monotonic()
    world = join_world(backend=config.cluster.backend, timeout_s=config.cluster.timeout_s)
    with open_run(config, overrides, world) as run:
        corpus = shared_corpus(config, world)
        finished = from_rank_zero(run.result, world)
        if finished is not None:
            check_same_text(finished["corpus"], corpus.folder.name, run)
            say(f"{run.path} is finished ({headline(finished)}); fresh=true starts over")
            return finished
        # A prompt that this tokenizer cannot read is better found now than after training.
        corpus.tokenizer.encode(config.prompt)
        model = build_model(config, corpus)
        if config.checkpoint.load is not None:
            load_weights(model, checkpoints.find_checkpoint(config.checkpoint.load), corpus.tokenizer)
            say(f"starting from the weights of {config.checkpoint.load}")
        training = session.Session(
            model,
            corpus,
            settings=session_settings(config),
            budget=Budget(config.planned_steps(), config.train.max_minutes),
            run=run,
            world=world,
            identity=identity(config.model, corpus.tokenizer),
            loggers=loggers.build_loggers(config.logger, run, plain_config=as_plain(config), group=config.name),
        )
        say(training.banner())
        outcome = training.fit()
        scores = training.score("val") | training.score("test")
        result = common_result(config, started) | outcome | scores
        result |= {"parameters": model.num_parameters(), "corpus": corpus.folder.name}
        result |= {"weights_sha256": checkpoints.weights_sha256(model)}
        if world.rank == 0:
            sample = sample_text(model, corpus, config)
            say(f"sample: {sample!r}")
            run.write_result(result | {"sample": sample})
        training.close()
        say(f"finished    {headline(result)}\n            {run.path / 'result.json'}")
    return result


def evaluate(config: Config, overrides: Sequence[str]) -> Result:
    """Loss, perplexity and bits per byte of a trained run; trains it first when no `checkpoint.load` says which."""
    from reprise.training import session

    started = time.monotonic()
    where = config.checkpoint.load
    if where is None:
        # A name of the user's or an experiment's own holds for both; else each task has its own.
        name = "pretrain" if config.name == config.task.name else config.name
        training_config = replace(config, task=TaskConfig("pretrain"), name=name)
        pretrain(training_config, overrides)
        where = str(training_config.run_folder().path)
    world = join_world(backend=config.cluster.backend, timeout_s=config.cluster.timeout_s)
    with open_run(config, overrides, world) as run:
        loaded = load_run(where, config, overrides, world)
        scoring = session.Session(
            loaded.model,
            loaded.corpus,
            settings=session_settings(loaded.config),
            budget=Budget(None, None),
            run=run,
            world=world,
            identity={},
        )
        scores = scoring.score("val") | scoring.score("test")
        result = common_result(config, started) | {"checkpoint": str(loaded.path)} | scoring.device_facts() | scores
        result["weights_sha256"] = checkpoints.weights_sha256(loaded.model)
        if world.rank == 0:
            run.write_result(result)
        say(f"written to {run.path / 'result.json'}")
    return result


def generate(config: Config, overrides: Sequence[str]) -> Result:
    """Text after a prompt, to the terminal as it comes."""
    started = time.monotonic()
    if config.checkpoint.load is None:
        raise UserError("checkpoint.load=null: give the run to generate from, a folder like runs/<name>/<digest>")
    loaded = load_run(config.checkpoint.load, config, overrides, World())
    tokenizer = loaded.corpus.tokenizer
    prompt_ids = tokenizer.encode(config.prompt)
    ids: list[int] = []
    shown = ""
    for token in generate_tokens(
        loaded.model, prompt_ids, settings=config.generate, eos_id=tokenizer.eos_id, seed=config.seed
    ):
        if not ids:
            # Not before: the first token is where the kernels say what they are.
            sys.stdout.write(config.prompt)
        ids.append(token)
        # A character may end in a later token: what cannot be decoded yet waits.
        text = tokenizer.decode(prompt_ids + ids)[len(tokenizer.decode(prompt_ids)) :]
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print("" if ids else config.prompt, flush=True)
    with open_run(config, overrides, World()) as run:
        result = common_result(config, started) | {
            "prompt": config.prompt,
            "text": shown,
            "checkpoint": str(loaded.path),
        }
        result["weights_sha256"] = checkpoints.weights_sha256(loaded.model)
        run.write_result(result)
    return result


def benchmark(config: Config, overrides: Sequence[str]) -> Result:
    """Speed of one part against its rivals, both in this process, in turn; every command measures anew."""
    from reprise.benchmarks import loss, outcome, recurrence, resets, scan, step
    from reprise.benchmarks.machine import Place

    started = time.monotonic()
    measures = {"recurrence": recurrence.measure, "resets": resets.measure, "loss": loss.measure, "scan": scan.measure}
    settings, place = config.benchmark, Place.of(config.cluster)
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    with open_run(config, overrides, World()) as run:
        if settings.name == "step":
            corpus = shared_corpus(config, World())
            model = build_model(config, corpus)
            found = step.measure(settings, place, model=model, corpus=corpus, training=session_settings(config))
        else:
            found = measures[settings.name](settings, place)
        machine = place.facts()
        outcome.show(found, machine, title=f"benchmark={settings.name}")
        result = common_result(config, started) | {"benchmark": settings.name} | machine | found.result()
        run.write_result(result)
        say(f"written to {run.path / 'result.json'}")
    return result


def report(config: Config, overrides: Sequence[str]) -> Result:
    """Curves of one or many runs as PNG, with the numbers behind them."""
    started = time.monotonic()
    with open_run(config, overrides, World()) as run:
        files = reports.write_report(config.runs or str(Path(config.paths.root) / "runs" / "*"), run.path)
        result = common_result(config, started) | {"files": [str(file) for file in files]}
        run.write_result(result)
    for file in files:
        say(str(file))
    return result


TASKS: dict[str, Callable[[Config, Sequence[str]], Result]] = {
    "prepare": prepare,
    "pretrain": pretrain,
    "evaluate": evaluate,
    "generate": generate,
    "benchmark": benchmark,
    "report": report,
}


def shared_corpus(config: Config, world: World) -> Corpus:
    """The prepared corpus; rank 0 prepares what is missing while the others wait, then they open what it made."""
    made: list[Corpus] = []

    def make() -> None:
        made.append(prepare_corpus(config.data, config.prepare, config.prepared_root()))

    from_rank_zero(make, world)
    return made[0] if made else prepare_corpus(config.data, config.prepare, config.prepared_root())


def session_settings(config: Config) -> "Settings":
    from reprise.training.session import Settings

    return Settings(
        data=config.data,
        train=config.train,
        optim=config.optim,
        schedule=config.schedule,
        cluster=config.cluster,
        checkpoint=config.checkpoint,
        seed=config.seed,
    )


def build_model(config: Config, corpus: Corpus) -> LanguageModel:
    """The model with weights that depend on the seed only."""
    torch.manual_seed(config.seed)
    return config.model.build(vocab_size=corpus.tokenizer.vocab_size)


@dataclass
class LoadedRun:
    """A trained run, ready to be asked."""

    config: Config
    corpus: Corpus
    model: LanguageModel
    path: Path


def load_run(where: str, config: Config, overrides: Sequence[str], world: World) -> LoadedRun:
    """A run's own model; its own corpus too, unless this command names data of its own.

    Raises:
        UserError: no checkpoint there, or it is one of another model or tokenizer than this command asks for.
    """
    path = checkpoints.find_checkpoint(where)
    saved = load_saved(checkpoints.run_of_checkpoint(path))
    model_config = said_of("model", saved.model, config.model, overrides)
    read_weights(path, model_identity(model_config))
    # Scores are taken in the run's own precision; how many ranks take them is this command's choice.
    cluster = said_of("cluster", replace(config.cluster, precision=saved.cluster.precision), config.cluster, overrides)
    data = said_of("data", saved.data, config.data, overrides)
    chosen = replace(config, model=model_config, data=data, cluster=cluster)
    corpus = shared_corpus(chosen, world)
    model = build_model(chosen, corpus)
    load_weights(model, path, corpus.tokenizer)
    return LoadedRun(chosen, corpus, model.eval(), path)


def start(tree: DictConfig, overrides: Sequence[str], *, command: str, sweep: str | None) -> float | None:
    """Run a job where it belongs: in this process, or on ranks started for it.

    Args:
        tree: the job's settings as Hydra composed them.
        overrides: the words of the command that set them.
        command: path of run.py, which the ranks run again.
        sweep: the sweep's folder when this is one job of many, else None.

    Returns:
        The sweep objective, validation loss, where the task has one.
    """
    if sweep is not None and is_rank():
        # A job that fails on one rank would leave the others behind in its collectives while that rank goes on.
        raise UserError("-m starts the ranks of every job itself: python run.py -m ... cluster.devices=2, no torchrun")
    if sweep is None:
        result = run_or_launch(load(tree), overrides, command=command, own_process=False)
    else:
        with SweepTable(Path(sweep)).job(overrides) as record:
            config = load(tree)
            run = config.run_folder()
            record["run"] = str(run.path)
            finished = None if config.fresh else run.result()
            if finished is not None:
                say(f"{run.path} is finished ({headline(finished)})")
            # A process a job: trackers, generators and memory of one never reach the next.
            result = finished or run_or_launch(config, overrides, command=command, own_process=True)
            record.update(result)
    return result.get("val/loss")


def run_or_launch(config: Config, overrides: Sequence[str], *, command: str, own_process: bool) -> Result:
    """Run the task here, or run this very command again as `cluster.devices` ranks and read the result they leave."""
    check(config)
    is_ranked = config.task.name in RANKED_TASKS
    if World.from_environment().rank != 0 and not is_ranked:
        return {}
    num_ranks = config.cluster.devices if is_ranked else 1
    if num_ranks > 1 and config.cluster.nodes > 1 and not is_rank():
        raise UserError(
            f"cluster.nodes={config.cluster.nodes}: start it on every node, by"
            f" torchrun --nnodes {config.cluster.nodes} run.py ..."
        )
    if is_rank() or (num_ranks == 1 and not own_process):
        try:
            result = TASKS[config.task.name](config, overrides)
        except (UserError, SystemExit):
            # Every rank raises it, after the last collective it has begun.
            leave_world()
            raise
        leave_world()
        return result
    launch_ranks([command, *overrides], num_ranks=num_ranks)
    left = config.run_folder().result()
    assert left is not None, "ranks that end well leave a result"
    return left


def check(config: Config) -> None:
    """What can be known to fail is said before any work starts."""
    from reprise.training.metrics_file import check_installed

    if config.checkpoint.load is not None:
        path = checkpoints.find_checkpoint(config.checkpoint.load)
        if config.task.name == "pretrain":
            read_weights(path, model_identity(config.model))
    check_installed(config.logger)
    if config.task.name in (*RANKED_TASKS, "benchmark"):
        config.cluster.check_devices()


def common_result(config: Config, started: float) -> Result:
    return {
        "task": config.task.name,
        "seconds": round(time.monotonic() - started, 3),
        "config_digest": config.digest(),
        "versions": package_versions(),
    }


def sample_text(model: LanguageModel, corpus: Corpus, config: Config) -> str:
    """A short text by the model, for a first look."""
    tokenizer = corpus.tokenizer
    model.eval()
    ids = generate_tokens(
        model, tokenizer.encode(config.prompt), settings=config.generate, eos_id=tokenizer.eos_id, seed=config.seed
    )
    return config.prompt + tokenizer.decode(list(ids))
