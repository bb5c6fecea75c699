"""Every notebook runs from top to bottom on a small run of its own, without network, key or terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, start, succeed

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run, made as a user would make it."""
    root = tmp_path_factory.mktemp("runs_for_notebooks")
    succeed(start(root, "debug=smoke", "cluster.precision=32-true"))
    return root / "runs"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs_and_leaves_its_figure(notebook: Path, runs: Path, tmp_path: Path) -> None:
    environment = os.environ | {"REPRISE_RUNS": str(runs), "REPRISE_FIGURES": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "--nbmake", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([*command, str(notebook)], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_stored_without_outputs(notebook: Path) -> None:
    assert '"outputs": []' in notebook.read_text(encoding="utf-8")
    assert '"image/png"' not in notebook.read_text(encoding="utf-8")
