"""Runs that several drills look at; each happens once."""

from pathlib import Path

import pytest
from commands import run
from drill_runs import SMALL


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything below it, so that the corpus is prepared once."""
    return tmp_path_factory.mktemp("drills")


@pytest.fixture(scope="session")
def straight(root: Path) -> Path:
    """The root, in which the run `straight` went from its start to its end, undisturbed, on one rank."""
    outcome = run(root, *SMALL, "name=straight")
    assert outcome.exit_code == 0, outcome.output
    return root
