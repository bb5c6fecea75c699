"""The command as a user gives it."""

import json
from pathlib import Path

from commands import run


def test_a_benchmark_leaves_its_result_in_its_run_folder(tmp_path: Path) -> None:
    done = run(tmp_path, "task=benchmark", "benchmark=resets", "debug=quick", "train.num_threads=1")
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "runs" / "benchmark").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert result["task"] == "benchmark" and result["benchmark"] == "resets"
    assert result["config_digest"] == folder.name and "torch" in result["versions"]
    assert result["threads"] == 1 and result["device"] == "cpu" and result["processor"]
    assert {"resets_8_over_none", "resets_8_over_pad_pack"} <= result["ratios"].keys()
    assert all(len(record["seconds"]) == 9 for record in result["records"])
    assert "resets_8_over_none" in done.output and str(folder / "result.json") in done.output
