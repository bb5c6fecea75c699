"""Every benchmark on its real path at tiny sizes: the ratios that records rely on, records of every side."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from reprise.benchmarks import loss, memory, recurrence, resets, scan
from reprise.benchmarks.config import BenchmarkConfig
from reprise.benchmarks.machine import Place
from reprise.benchmarks.outcome import Outcome, show
from reprise.benchmarks.windows import Size

RECURRENCE_RATIOS = {
    "custom_bf16_over_loop_fp32",
    "custom_bf16_over_library_fp32",
    "custom_bf16_over_library_bf16",
    "custom_fp32_over_library_fp32",
    "diagonal_over_full_bf16",
    "gru_bf16_over_library_fp32",
}


def checked(outcome: Outcome, ratios: set[str]) -> dict[str, Any]:
    """The outcome as `result.json` would hold it, complete in itself."""
    result: dict[str, Any] = json.loads(json.dumps(outcome.result()))
    assert ratios <= result["ratios"].keys()
    for name, ratio in result["ratios"].items():
        assert set(ratio) == {"median", "low", "high"}, name
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"], name
    for record in result["records"]:
        assert len(record["seconds"]) == 9 and min(record["seconds"]) > 0
        assert record["implementation"] and record["products"]
    names = [(record["case"], record["side"]) for record in result["records"]]
    assert len(set(names)) == len(names)
    return result


def test_recurrence(tiny: BenchmarkConfig, place: Place) -> None:
    result = checked(recurrence.measure(tiny, place), RECURRENCE_RATIOS)
    further = [f"{width}x{num_rows}" for width, num_rows in tiny.further_sizes()]
    assert further == ["4x3", "8x1"]
    for size in further:
        assert f"custom_bf16_over_library_bf16_at_{size}" in result["ratios"]
    sides = {record["side"]: record for record in result["records"] if record["case"] == "8x3"}
    assert sides["loop_fp32"]["implementation"] == "reference"
    assert sides["custom_bf16"]["products"] == "bf16" and sides["custom_bf16"]["recurrence"] == "full"
    assert sides["custom_bf16"]["switches"] == ["coupled_gates", "layer_norm", "temporal_residual"]
    assert sides["diagonal_bf16"]["recurrence"] == "diagonal"
    slow = {name for name, ratio in result["ratios"].items() if "_over_library" in name and ratio["median"] < 1}
    assert set(result["slower_than_library"]) == slow


def test_resets(tiny: BenchmarkConfig, place: Place) -> None:
    result = checked(resets.measure(tiny, place), {"resets_4_over_none", "resets_4_over_pad_pack"})
    assert [found["products"] for found in result["documents_alone"]] == ["bf16", "fp32"]
    assert [found["documents"] for found in result["documents_alone"]] == [5, 5]
    assert result["documents_alone"][1]["relative_rms"] < 1e-5


def test_a_state_that_leaks_between_documents_is_seen(place: Place) -> None:
    size = Size(8, 3, 6)
    reset_BT = resets.staggered_resets(size, 3)

    class Leaky(torch.nn.Module):
        """A cell that overlooks resets inside a window."""

        def __init__(self, cell: Any) -> None:
            super().__init__()
            self.cell, self.state_parts, self.initial_state = cell, cell.state_parts, cell.initial_state

        def forward(self, x_BTD: Any, state: Any, reset_BT: Any) -> Any:
            return self.cell(x_BTD, state, None)

    kept = resets.build_cell
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resets, "build_cell", lambda *arguments: Leaky(kept(*arguments)))
        found = resets.compare_alone(size, place, reset_BT=reset_BT, product=torch.float32)
    assert found.relative_rms > 1e-2 and not found.is_identical


def test_loss(tiny: BenchmarkConfig, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "is_measurable", lambda device: False)
    result = checked(loss.measure(tiny, place), {"loss_bf16_over_full_fp32", "loss_fp32_over_full_fp32"})
    assert "memory" not in result
    assert {error["side"] for error in result["errors"]} == {record["side"] for record in result["records"]}


def test_scan(tiny: BenchmarkConfig, place: Place) -> None:
    ratios = {"scan_eager_over_reference", "mingru_bf16_over_library_gru_fp32", "rglru_bf16_over_library_gru_fp32"}
    result = checked(scan.measure(tiny, place), ratios)
    assert {"scan_eager", "scan_reference"} <= {record["side"] for record in result["records"]}


def test_what_is_printed_names_machine_sides_and_ratios(
    tiny: BenchmarkConfig, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = resets.measure(replace(tiny, document_tokens=3), place)
    show(outcome, place.facts(), title="benchmark=resets")
    printed = capsys.readouterr().out
    assert f"{torch.get_num_threads()} threads" in printed
    for word in ("benchmark=resets on cpu", "resets_3_over_none", "resets_bf16", "pad_pack_fp32", "tokens/s"):
        assert word in printed


@pytest.mark.skipif(not memory.is_measurable("cpu"), reason="this system does not tell a process its peak memory")
def test_memory_that_a_call_takes_is_seen_and_what_was_there_is_not() -> None:
    kept = torch.ones(1 << 24)
    growth = memory.growth_here(lambda: torch.ones(1 << 24).sum())
    assert kept.numel() * 4 == pytest.approx(growth.peak_bytes, rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif(not memory.is_measurable("cpu"), reason="this system does not tell a process its peak memory")
def test_full_logits_take_their_memory_and_ours_do_not(tiny: BenchmarkConfig, place: Place) -> None:
    settings = replace(tiny, num_tokens=2048, vocab_size=4096, width=16)
    result = loss.measure(settings, place).result()["memory"]
    assert result["logits_bytes_a_token"] == 4 * 4096
    assert result["full_fp32"]["bytes_a_token"] > result["logits_bytes_a_token"]
    assert result["loss_bf16"]["bytes_a_token"] < 0.1 * result["logits_bytes_a_token"]
