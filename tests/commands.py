"""Commands as a user gives them: only composed and checked, in this process, or run whole, each in one of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from reprise import config, jobs
from reprise.config import Config
from reprise.runtime import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
CONF = REPOSITORY / "conf"


def compose(*words: str) -> DictConfig:
    """What Hydra makes of `python run.py <words>`."""
    config.register_schema()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return hydra.compose("config", list(words))


def settings(*words: str) -> Config:
    """The typed settings of `python run.py <words>`."""
    return config.load(compose(*words))


def told(*words: str) -> str:
    """What `python run.py <words>` says before any work: the one line of the mistake, or nothing."""
    try:
        jobs.check(settings(*words))
    except UserError as error:
        return str(error)
    except (HydraException, OmegaConfBaseException) as error:
        return config.explain(error, words)
    return ""


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and what it said on both its outputs."""

    exit_code: int
    output: str


def start(root: Path, *words: str, launcher: tuple[str, ...] = (), home: Path | None = None) -> "subprocess.Popen[str]":
    """Start `python [launcher] run.py <words>` with everything it writes under `root`, and its input closed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if home is None else {"HOME": str(home)})
    return subprocess.Popen(
        [sys.executable, *launcher, "run.py", *words, f"paths.root={root}"],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> Outcome:
    """Wait for the process; one that hangs is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"no end within 240 s; it said:\n{output}")
    return Outcome(process.returncode, output)


def run(root: Path, *words: str, launcher: tuple[str, ...] = (), home: Path | None = None) -> Outcome:
    """Start it and wait."""
    return finish(start(root, *words, launcher=launcher, home=home))


def succeed(*processes: "subprocess.Popen[str]") -> list[Outcome]:
    """Wait for all; each must end well."""
    outcomes = [finish(process) for process in processes]
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.output
    return outcomes
