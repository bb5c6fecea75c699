"""The typed schema of every command, checks across its sections, and one clear line for what is wrong.

Each section's dataclass lives beside its user; here they come together. `load` turns Hydra's tree into these
dataclasses, so that every `__post_init__` has run before any work begins.
"""

import contextlib
import copy
import difflib
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Optional, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reprise.benchmarks.config import BenchmarkConfig
from reprise.cells.config import CELLS
from reprise.data.corpora import DataConfig, PrepareConfig
from reprise.distributed.membership import ClusterConfig
from reprise.evaluation.language import GenerateConfig
from reprise.models import ModelConfig
from reprise.runtime import (
    RunFolder,
    UserError,
    World,
    as_plain,
    check_one_of,
    digest_of,
    environment_text,
    from_rank_zero,
    is_rank,
    write_atomically,
)
from reprise.training.budget import TrainConfig
from reprise.training.checkpoint import CheckpointConfig
from reprise.training.metrics_file import LoggerConfig
from reprise.training.optim import OptimConfig, ScheduleConfig

# What may differ between two commands that mean the same run: where and how often something is written, no number.
_WITHOUT_EFFECT = (
    "name",
    "fresh",
    "paths",
    "logger",
    "train.log_every_steps",
    "train.validate_every_steps",
    "checkpoint.every_steps",
    "checkpoint.every_minutes",
    "checkpoint.keep_latest",
    "cluster.timeout_s",
    "prepare.num_threads",
    "data.num_workers",
)
# Tasks that compute on several ranks; the others run in the process that was asked.
RANKED_TASKS = ("pretrain", "evaluate")
# Tasks in which a model that hears what comes next would be told the answer.
_NEXT_TOKEN_TASKS = ("pretrain", "evaluate", "generate")
# Sections that only tasks with a model read.
_OF_A_MODEL = (
    "seed",
    "model",
    "optim",
    "schedule",
    "train",
    "cluster",
    "checkpoint",
    "generate",
    "prompt",
    "benchmark",
)
# Sections that a task does not read.
_UNUSED_BY_TASK = {
    "prepare": (*_OF_A_MODEL, "runs", "data.num_lanes", "data.window", "data.eval_lanes"),
    "pretrain": ("prompt", "runs", "generate", "benchmark"),
    "evaluate": ("prompt", "runs", "generate", "benchmark"),
    "generate": ("runs", "benchmark"),
    "benchmark": ("checkpoint", "generate", "prompt", "runs"),
    "report": (*_OF_A_MODEL, "data", "prepare"),
}


@dataclass
class TaskConfig:
    """Which task a command runs."""

    name: str = "pretrain"

    def __post_init__(self) -> None:
        check_one_of("task.name", self.name, allowed=tuple(_UNUSED_BY_TASK))


@dataclass
class PathsConfig:
    """`root` holds `runs/`, `prepared/` and `sweeps/`."""

    root: str = "."


@dataclass
class Config:
    """Everything a command can set; one field a section of `conf/`."""

    task: TaskConfig = field(default_factory=TaskConfig)
    name: str = "pretrain"
    seed: int = 1
    fresh: bool = False
    prompt: str = ""
    runs: Optional[str] = None
    paths: PathsConfig = field(default_factory=PathsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed={self.seed}: at least 0")
        if not re.fullmatch(r"[\w.,=+-]+", self.name):
            raise UserError(f"name={self.name!r}: letters, digits and . , = + - _ only, since it names a folder")

    def check(self) -> None:
        """Raise a UserError for what no section can know alone.

        Not in `__post_init__`, which also runs on the schema's bare defaults.
        """
        train = self.train
        if train.max_steps is None and train.max_tokens is None and train.max_minutes is None:
            raise UserError(
                "train.max_steps=null: set at least one of train.max_steps, train.max_tokens, train.max_minutes"
            )
        ranks = self.cluster.devices * self.cluster.nodes
        if self.data.num_lanes < ranks * self.train.accumulate:
            raise UserError(
                f"data.num_lanes={self.data.num_lanes}: fewer than one lane a group; cluster.devices x cluster.nodes x"
                f" train.accumulate = {ranks * self.train.accumulate}"
            )
        if self.cluster.precision == "16-mixed" and self.train.clip_norm is None and self.optim.kind == "sgd":
            raise UserError("cluster.precision=16-mixed with optim=sgd and train.clip_norm=null: set train.clip_norm")
        kind = self.model.cell.kind
        if self.task.name in _NEXT_TOKEN_TASKS and not CELLS[kind].is_causal:
            causal = ", ".join(name for name, cell in CELLS.items() if cell.is_causal)
            raise UserError(
                f"model.cell.kind={kind}: hears the token that task={self.task.name} is to predict; allowed: {causal}"
            )

    def tokens_per_step(self) -> int:
        """Targets of a full step over all lanes of all ranks."""
        return self.data.num_lanes * self.data.window

    def planned_steps(self) -> int | None:
        """Optimizer steps asked for; None when only wall time limits the run."""
        return self.train.planned_steps(self.tokens_per_step())

    def digest(self) -> str:
        """Digest of the settings that can change the task's result."""
        plain = as_plain(self)
        for dotted in (*_WITHOUT_EFFECT, *_UNUSED_BY_TASK[self.task.name]):
            *sections, key = dotted.split(".")
            section = plain
            for name in sections:
                section = section.get(name, {})
            section.pop(key, None)
        return digest_of(plain)

    def run_folder(self) -> RunFolder:
        """Where the run of these settings is, whether it has been made or not."""
        return RunFolder(Path(self.paths.root) / "runs" / self.name / self.digest())

    def prepared_root(self) -> Path:
        """Where prepared corpora are."""
        return Path(self.paths.root) / "prepared"


def register_schema() -> None:
    """Give Hydra the types, and `${sweep_id:}`: one id for all jobs of a command, the same when it is given again."""
    OmegaConf.register_new_resolver("sweep_id", lambda: digest_of({"command": sys.argv[1:]}), replace=True)
    ConfigStore.instance().store(name="schema", node=Config)


def load(tree: DictConfig) -> Config:
    """The typed config of one job, every check passed, with the ranks that an agent really started.

    Raises:
        UserError: the first thing that is wrong, by its key.
    """
    # `+key=value` opens even a typed tree, and would then be ignored in silence.
    known = set(all_keys())
    for key in _keys_of(tree):
        if key not in known:
            raise UserError(unknown_key(key))
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    world = World.from_environment()
    if is_rank() and config.task.name in RANKED_TASKS:
        config.cluster.devices, config.cluster.nodes = world.local_size, world.num_nodes
    config.check()
    return config


@contextlib.contextmanager
def open_run(config: Config, overrides: Sequence[str], world: World) -> Iterator[RunFolder]:
    """The run's folder, held by rank 0 alone, with its settings written down; `fresh=true` empties it first."""
    run = config.run_folder()
    with contextlib.ExitStack() as stack:

        def take() -> None:
            stack.enter_context(run.locked())
            if config.fresh:
                for entry in run.path.iterdir():
                    if entry.name != ".lock":
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            if not (run.path / "config.yaml").exists():
                write_atomically(run.path / "overrides.txt", "\n".join(overrides) + "\n")
                write_atomically(run.path / "environment.txt", environment_text())
                write_atomically(run.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))

        from_rank_zero(take, world)
        yield run


def load_saved(run: Path) -> Config:
    """The config that a run was made with.

    Raises:
        UserError: not a run folder, or one of a version of this project with other settings.
    """
    file = run / "config.yaml"
    if not file.exists():
        raise UserError(f"{run}: no config.yaml there; give a run folder, or a checkpoint inside one")
    try:
        saved = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(file)))
    except (OmegaConfBaseException, UserError) as error:
        raise UserError(
            f"{file}: written by another version of this project ({_one_line(error)});"
            f" {run / 'environment.txt'} names its commit"
        ) from error
    assert isinstance(saved, Config)
    return saved


Section = TypeVar("Section")


def said_of(section: str, saved: Section, own: Section, overrides: Sequence[str]) -> Section:
    """A saved run's section with what this command itself says of it.

    An option of the group (`data=ptb`, `model/cell=gru`) brings the command's whole section; single keys
    (`data.eval_lanes=1`) are laid over the saved one.
    """
    words = [override.lstrip("+").partition("=")[0] for override in overrides]
    if any(word == section or word.startswith(f"{section}/") for word in words):
        return own
    merged = copy.deepcopy(saved)
    for word in words:
        first, *path = word.split(".")
        if first == section and path:
            target, source = merged, own
            for name in path[:-1]:
                target, source = getattr(target, name), getattr(source, name)
            setattr(target, path[-1], getattr(source, path[-1]))
    return merged


def all_keys(node: Any = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema."""
    keys = []
    for item in fields(node):
        keys.append(prefix + item.name)
        if is_dataclass(item.type):
            keys += all_keys(item.type, f"{prefix}{item.name}.")
    return keys


def _keys_of(tree: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, tree):
        yield f"{prefix}{key}"
        if not OmegaConf.is_missing(tree, key) and isinstance(tree[key], DictConfig):
            yield from _keys_of(tree[key], f"{prefix}{key}.")


def unknown_key(key: str) -> str:
    """What to tell of a key that the schema does not have."""
    return f"{key}: no such key{_nearest(key, all_keys())}"


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line for an error Hydra or OmegaConf found while composing: the key, what is wrong, the nearest key."""
    text = " ".join(str(part) for part in (error, error.__cause__) if part is not None)
    # First, since some groups are no keys of the schema.
    if match := re.search(r"Could not find '([^']+)'\s+Available options in '([^']+)':\s*(.*)", str(error), re.DOTALL):
        options = match[3].partition("Config search path")[0].split()
        wanted = match[1].rpartition("/")[2]
        return f"{match[2]}={wanted}: no such option{_nearest(wanted, options)}; one of {', '.join(options)}"
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key not in all_keys() and "/" not in key and not key.startswith("hydra.") and f"'{key}'" in text:
            return unknown_key(key)
    if str(error).startswith("Error merging override ") and error.__cause__ is not None:
        override, reason = str(error).removeprefix("Error merging override "), str(error.__cause__).splitlines()[0]
        if expected := re.search(r"could not be converted to (\w+)", reason):
            reason = f"not of the right type, {expected[1]} expected"
        return f"{override}: {reason}"
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()


def _nearest(word: str, words: Sequence[str]) -> str:
    # The section may have been left out.
    close = [name for name in words if name.rpartition(".")[2] == word][:1]
    close = close or difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    if not close:
        # The section may be right and the last part far off.
        leaves = {name.rpartition(".")[2]: name for name in words}
        close = [
            leaves[leaf] for leaf in difflib.get_close_matches(word.rpartition(".")[2], list(leaves), n=1, cutoff=0.6)
        ]
    return f"; did you mean {close[0]}?" if close else ""
