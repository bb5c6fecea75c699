"""The tasks, wired by hand in reading order."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reprise.config import Config, TaskConfig, load_saved, open_run, said_of
from reprise.data.prepare import prepare as prepare_corpus
from reprise.data.shards import Corpus
from reprise.data.tokenizer import Tokenizer
from reprise.evaluation import report as reports
from reprise.evaluation.language import generate as generate_tokens
from reprise.evaluation.report import headline
from reprise.models import LanguageModel
from reprise.runtime import UserError, World, as_plain, from_rank_zero, join_world, package_versions, say
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
        encode_prompt(config, corpus.tokenizer)
        model = starting_model(config, corpus)
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
        result["weights_sha256"] = checkpoints.weights_sha256(model)
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
        raise UserError(f"checkpoint.load=null: there is nothing to generate from; {checkpoints.WAY_OUT}")
    loaded = load_run(config.checkpoint.load, config, overrides, World())
    tokenizer = loaded.corpus.tokenizer
    prompt_ids = encode_prompt(config, tokenizer)
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
    """The sections of the config that training reads."""
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


def starting_model(config: Config, corpus: Corpus) -> LanguageModel:
    """The model that training begins with: fresh, or with the weights of `checkpoint.load`.

    Raises:
        UserError: no checkpoint there, or one of another model or tokenizer.
    """
    model = build_model(config, corpus)
    if config.checkpoint.load is not None:
        load_weights(model, checkpoints.find_checkpoint(config.checkpoint.load), corpus.tokenizer)
        say(f"starting from the weights of {config.checkpoint.load}")
    return model


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


def common_result(config: Config, started: float) -> Result:
    """What every task's result begins with; `started` is the reading of `time.monotonic` when the task began."""
    return {
        "task": config.task.name,
        "seconds": round(time.monotonic() - started, 3),
        "config_digest": config.digest(),
        "versions": package_versions(),
    }


def encode_prompt(config: Config, tokenizer: Tokenizer) -> list[int]:
    """Ids of the prompt.

    Raises:
        UserError: this tokenizer cannot read it.
    """
    try:
        return tokenizer.encode(config.prompt)
    except UserError as error:
        raise UserError(f"prompt={config.prompt!r}: {error}") from None


def sample_text(model: LanguageModel, corpus: Corpus, config: Config) -> str:
    """A short text by the model, for a first look."""
    tokenizer = corpus.tokenizer
    model.eval()
    prompt_ids = encode_prompt(config, tokenizer)
    ids = generate_tokens(model, prompt_ids, settings=config.generate, eos_id=tokenizer.eos_id, seed=config.seed)
    return config.prompt + tokenizer.decode(list(ids))
