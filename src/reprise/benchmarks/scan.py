"""`benchmark=scan`: the linear scan in each of its implementations, and the cells on it against nn.GRU.

Legend: B rows, T time, D width.
"""

from dataclasses import replace

import torch

from reprise.benchmarks.config import BenchmarkConfig
from reprise.benchmarks.machine import Place
from reprise.benchmarks.outcome import Outcome, rates_table
from reprise.benchmarks.recurrence import CUSTOM, PLAIN_GRU
from reprise.benchmarks.rivals import library_side
from reprise.benchmarks.timing import Side, Timings, interleave, speed_ratio
from reprise.benchmarks.windows import ForwardBackward, Size, cell_side, window_input, window_state
from reprise.kernels.dispatch import KERNELS, pick
from reprise.runtime import UserError, say

KERNEL = "linear_scan"
# The cells whose state is one linear scan.
SCANNED_CELLS = ("mingru", "minlstm", "rglru")


def measure(settings: BenchmarkConfig, place: Place) -> Outcome:
    """Forward and backward of the scan alone, then of whole cells with their input products."""
    size = Size(settings.width, settings.num_rows, settings.num_steps)
    outcome = Outcome()
    say(f"measuring the scan at {size} (width x rows), {size.num_steps} positions")
    scans = interleave(_scan_sides(outcome, size, place), settings.pace(), synchronise=place.synchronise)
    outcome.add(f"scan {size}", scans)
    outcome.tables.append(rates_table("linear scan alone, fp32", scans))
    say(f"measuring cells at {size}")
    cells = interleave(_cell_sides(size, place), settings.pace(), synchronise=place.synchronise)
    outcome.add(f"cell {size}", cells)
    outcome.tables.append(rates_table("cells with their input products", cells))
    _add_ratios(outcome, scans, cells)
    return outcome


def _scan_sides(outcome: Outcome, size: Size, place: Place) -> list[Side]:
    """A side for every implementation that runs here; what does not is told by its own words."""
    sides = []
    missing: dict[str, str] = {}
    for name in KERNELS[KERNEL]:
        try:
            sides.append(_scan_side(name, size, place))
        except UserError as error:
            missing[name] = str(error)
    outcome.findings["not_here"] = missing
    return sides


def _scan_side(implementation: str, size: Size, place: Place) -> Side:
    scan = pick(KERNEL, place.device.type, torch.float32, implementation)
    value_BTD = window_input(size, place)
    decay_BTD = torch.sigmoid(window_input(size, place).detach()).requires_grad_()
    (initial_BD,) = window_state(size, place, num_parts=1)

    def forward() -> tuple[torch.Tensor, ...]:
        return (scan(decay_BTD, value_BTD, initial_BD, None),)

    facts = size.facts() | {"kind": KERNEL, "products": "none", "implementation": implementation}
    work = ForwardBackward(forward, [decay_BTD, value_BTD, initial_BD])
    # What cannot run here says so now.
    work()
    return Side(f"scan_{implementation}", work, size.tokens, facts)


def _cell_sides(size: Size, place: Place) -> list[Side]:
    configs = {kind: replace(PLAIN_GRU, kind=kind) for kind in SCANNED_CELLS}
    # Elementwise recurrence too, but through its gates: a loop over time, and no scan.
    configs["diagonal_lstm"] = replace(CUSTOM, layer_norm=False, temporal_residual=False, recurrence="diagonal")
    configs |= {"gru": PLAIN_GRU, "custom": CUSTOM}
    ours = [
        cell_side(f"{name}_bf16", config, size=size, place=place, product=torch.bfloat16)
        for name, config in configs.items()
    ]
    return [*ours, library_side("library_gru_fp32", "gru", size=size, place=place)]


def _add_ratios(outcome: Outcome, scans: Timings, cells: Timings) -> None:
    for name, timing in scans.items():
        for twin in ("eager", "reference"):
            if name not in ("scan_reference", f"scan_{twin}"):
                outcome.ratios[f"{name}_over_{twin}"] = speed_ratio(timing, scans[f"scan_{twin}"])
    for name in (*SCANNED_CELLS, "diagonal_lstm", "gru"):
        timing = cells[f"{name}_bf16"]
        outcome.ratios[f"{name}_bf16_over_library_gru_fp32"] = speed_ratio(timing, cells["library_gru_fp32"])
        outcome.ratios[f"{name}_bf16_over_custom_bf16"] = speed_ratio(timing, cells["custom_bf16"])
