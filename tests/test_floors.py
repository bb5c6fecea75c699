"""The import rules: a file imports from the floors below it and its own package; Lightning only inside training/."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "reprise"
FLOORS = {
    "runtime": 0,
    "kernels": 1,
    "cells": 2,
    "models": 3,
    "data": 3,
    "distributed": 3,
    "evaluation": 4,
    "planner": 4,
    "training": 5,
    "benchmarks": 6,
    "config": 7,
    "tasks": 8,
    "jobs": 9,
    "run": 10,
}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
LIGHTNING_ROOM = "training"


def imported_modules(source: str, *, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, at any depth: functions and `TYPE_CHECKING` blocks too."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            # `from reprise import models` imports the module `reprise.models`.
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}" if base == PACKAGE else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value


def violations(root: Path) -> list[str]:
    """One line for every forbidden import under `root/src/reprise` and in `root/run.py`."""
    package_folder = root / "src" / PACKAGE
    found = []
    for file in [*sorted(package_folder.rglob("*.py")), root / "run.py"]:
        parts = ("run",) if file == root / "run.py" else file.relative_to(package_folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        own_parts = parts[:-1] if is_package else parts
        room = own_parts[0] if own_parts else ""
        where = file.relative_to(root)
        if room and room not in FLOORS:
            found.append(f"{where}: {room} has no floor")
            continue
        module = ".".join((PACKAGE, *own_parts))
        source = file.read_text(encoding="utf-8")
        for line, name in imported_modules(source, module=module, is_package=is_package):
            reason = forbidden(name, room)
            if reason:
                found.append(f"{where}:{line}: {reason}")
    return found


def forbidden(name: str, room: str) -> str | None:
    """Why a file of `room` may not import the module `name`, or None where it may."""
    first, _, rest = name.partition(".")
    if first in LIGHTNING and room != LIGHTNING_ROOM:
        return f"{room} imports {name}: Lightning only inside {LIGHTNING_ROOM}/"
    if first == "run":
        return f"{room} imports run.py"
    target = rest.partition(".")[0]
    if first != PACKAGE or not target or target == room:
        return None
    if not room:
        return f"the package itself imports {name}"
    if target not in FLOORS:
        return f"{room} imports {name}, which has no floor"
    if FLOORS[target] >= FLOORS[room]:
        return f"{room} (floor {FLOORS[room]}) imports {target} (floor {FLOORS[target]})"
    return None


def test_every_file_imports_from_below_only() -> None:
    assert violations(REPOSITORY) == []


def test_every_file_is_looked_at() -> None:
    files = list((REPOSITORY / "src" / PACKAGE).rglob("*.py"))
    rooms = {file.relative_to(REPOSITORY / "src" / PACKAGE).parts[0].removesuffix(".py") for file in files}
    assert {"runtime", "kernels", "cells", "models", "data", "training", "config", "tasks", "jobs"} <= rooms


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A tree that keeps the rules, to plant imports in."""
    package = tmp_path / "src" / PACKAGE
    for room in ("kernels", "cells", "data", "evaluation", "training", "benchmarks"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("")
    (package / "__init__.py").write_text('"""A package."""\n')
    (package / "runtime.py").write_text("import os\n")
    (package / "kernels" / "reference.py").write_text("import torch\nfrom reprise.runtime import UserError\n")
    (package / "models.py").write_text("from reprise.cells import base\nfrom reprise import kernels\n")
    (package / "data" / "lanes.py").write_text("from . import shards\nfrom reprise.data.shards import Corpus\n")
    (package / "training" / "trainer.py").write_text("import lightning.pytorch\nimport reprise.models\n")
    (package / "tasks.py").write_text("def go():\n    from reprise.training import trainer\n")
    (package / "jobs.py").write_text("from reprise import tasks\n")
    (tmp_path / "run.py").write_text("from reprise import jobs\n")
    assert violations(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("models.py", "from reprise.data.shards import Corpus", "models (floor 3) imports data (floor 3)"),
        ("data/lanes.py", "import reprise.models", "data (floor 3) imports models (floor 3)"),
        ("data/lanes.py", "from reprise import models", "data (floor 3) imports models (floor 3)"),
        ("data/lanes.py", "from .. import models", "data (floor 3) imports models (floor 3)"),
        ("data/lanes.py", "from ..models import LanguageModel", "data (floor 3) imports models (floor 3)"),
        ("kernels/cpu.py", "from reprise.cells.base import Cell", "kernels (floor 1) imports cells (floor 2)"),
        ("runtime.py", "import reprise.kernels.reference", "runtime (floor 0) imports kernels (floor 1)"),
        ("evaluation/language.py", "import reprise.training", "evaluation (floor 4) imports training (floor 5)"),
        ("cells/base.py", "def f():\n    from reprise.models import x", "cells (floor 2) imports models (floor 3)"),
        (
            "data/lanes.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from reprise.training.budget import Budget",
            "data (floor 3) imports training (floor 5)",
        ),
        ("data/lanes.py", "import importlib\nimportlib.import_module('reprise.models')", "data (floor 3) imports"),
        ("training/trainer.py", "from reprise.config import Config", "training (floor 5) imports config (floor 7)"),
        ("benchmarks/step.py", "import reprise.config", "benchmarks (floor 6) imports config (floor 7)"),
        ("training/trainer.py", "import reprise.benchmarks", "training (floor 5) imports benchmarks (floor 6)"),
        ("config.py", "import reprise.tasks", "config (floor 7) imports tasks (floor 8)"),
        ("tasks.py", "from reprise.jobs import start", "tasks (floor 8) imports jobs (floor 9)"),
        ("tasks.py", "import run", "tasks imports run.py"),
        ("tasks.py", "def f():\n    import lightning.pytorch as lightning", "tasks imports lightning.pytorch"),
        ("data/lanes.py", "from lightning.pytorch import LightningDataModule", "Lightning only inside training/"),
        ("evaluation/language.py", "import pytorch_lightning", "Lightning only inside training/"),
        ("utils.py", "import os", "utils has no floor"),
        ("__init__.py", "from reprise.models import LanguageModel", "the package itself imports"),
    ],
)  # fmt: skip
def test_a_planted_import_is_reported(planted: Path, file: str, text: str, told: str) -> None:
    path = planted / "src" / PACKAGE / file
    path.write_text(text + "\n")
    found = violations(planted)
    assert len(found) == 1 and told in found[0], found
    assert found[0].startswith(f"src/{PACKAGE}/{file}")
