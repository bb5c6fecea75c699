"""The command as a user gives it."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_benchmark_leaves_its_result_in_its_run_folder(tmp_path: Path) -> None:
    words = ("task=benchmark", "benchmark=resets", "debug=quick", "train.num_threads=1", f"paths.root={tmp_path}")
    done = subprocess.run(
        [sys.executable, "run.py", *words], cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs" / "benchmark").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert result["task"] == "benchmark" and result["benchmark"] == "resets"
    assert result["config_digest"] == folder.name and "torch" in result["versions"]
    assert result["threads"] == 1 and result["device"] == "cpu" and result["processor"]
    assert {"resets_8_over_none", "resets_8_over_pad_pack"} <= result["ratios"].keys()
    assert all(len(record["seconds"]) == 9 for record in result["records"])
    assert "resets_8_over_none" in done.stdout and str(folder / "result.json") in done.stdout
