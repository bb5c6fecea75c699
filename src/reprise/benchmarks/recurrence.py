"""`benchmark=recurrence`: one layer over one window, forward and backward, against the library's and the loop."""

from dataclasses import replace

import torch

from reprise.benchmarks.config import BenchmarkConfig
from reprise.benchmarks.machine import Place
from reprise.benchmarks.outcome import Outcome, rates_table
from reprise.benchmarks.rivals import BF16_WAYS, library_side
from reprise.benchmarks.timing import Side, Spread, Timing, Timings, fastest, interleave, speed_ratio
from reprise.benchmarks.windows import Size, cell_side
from reprise.cells.config import CellConfig
from reprise.runtime import say

# Coupled gates, layer norm and temporal residual: the cell this project exists for.
CUSTOM = CellConfig(kind="lstm", coupled_gates=True, layer_norm=True, temporal_residual=True)
# The equations of nn.GRU.
PLAIN_GRU = CellConfig(kind="gru", coupled_gates=False, layer_norm=False, temporal_residual=False)


def measure(settings: BenchmarkConfig, place: Place) -> Outcome:
    """The main size with every side and ratio; further sizes with our cells and the library's."""
    outcome = Outcome()
    size = Size(settings.width, settings.num_rows, settings.num_steps)
    _measure_size(outcome, settings, size=size, place=place, is_main=True)
    for width, num_rows in settings.further_sizes():
        _measure_size(outcome, settings, size=Size(width, num_rows, settings.num_steps), place=place, is_main=False)
    # "Nowhere slower than the library's cell" is for the reader to see, and for us to say where it is not so.
    slower = [name for name, spread in outcome.ratios.items() if "_over_library" in name and spread.median < 1.0]
    outcome.findings["slower_than_library"] = slower
    return outcome


def _measure_size(outcome: Outcome, settings: BenchmarkConfig, *, size: Size, place: Place, is_main: bool) -> None:
    say(f"measuring {size} (width x rows), {size.num_steps} positions")
    sides = _sides(size, place) + (_main_sides(size, place) if is_main else [])
    timings = interleave(sides, settings.pace(), synchronise=place.synchronise)
    outcome.add(str(size), timings)
    outcome.tables.append(rates_table(f"width {size.width}, {size.num_rows} rows, {size.num_steps} steps", timings))
    suffix = "" if is_main else f"_at_{size}"
    for name, spread in _ratios(timings).items():
        outcome.ratios[name + suffix] = spread
    if is_main:
        outcome.findings["library_bf16_is"] = _library_bf16(timings).side.facts["implementation"]


def _sides(size: Size, place: Place) -> list[Side]:
    """Our cells and the library's, measured at every size."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        cell_side("custom_bf16", CUSTOM, size=size, place=place, product=bf16),
        cell_side("custom_fp32", CUSTOM, size=size, place=place, product=fp32),
        cell_side("gru_bf16", PLAIN_GRU, size=size, place=place, product=bf16),
        library_side("library_fp32", "lstm", size=size, place=place),
        *(library_side(f"library_bf16_{way}", "lstm", size=size, place=place, bf16=way) for way in BF16_WAYS),
        library_side("library_gru_fp32", "gru", size=size, place=place),
    ]


def _main_sides(size: Size, place: Place) -> list[Side]:
    """What is measured at the main size only: the loop, and the other structures of the recurrent product."""
    loop = replace(CUSTOM, implementation="reference")
    sides = [cell_side("loop_fp32", loop, size=size, place=place, product=torch.float32)]
    for recurrence in ("block", "diagonal"):
        config = replace(CUSTOM, recurrence=recurrence)
        sides.append(cell_side(f"{recurrence}_bf16", config, size=size, place=place, product=torch.bfloat16))
    return sides


def _library_bf16(timings: Timings) -> Timing:
    """The library's LSTM in bf16, whichever way to get there is the faster."""
    return fastest(*(timings[f"library_bf16_{way}"] for way in BF16_WAYS))


def _ratios(timings: Timings) -> dict[str, Spread]:
    custom_bf16, custom_fp32, gru_bf16 = (timings[name] for name in ("custom_bf16", "custom_fp32", "gru_bf16"))
    library_fp32 = timings["library_fp32"]
    ratios = {
        "custom_bf16_over_library_fp32": speed_ratio(custom_bf16, library_fp32),
        "custom_bf16_over_library_bf16": speed_ratio(custom_bf16, _library_bf16(timings)),
        "custom_fp32_over_library_fp32": speed_ratio(custom_fp32, library_fp32),
        "gru_bf16_over_library_fp32": speed_ratio(gru_bf16, timings["library_gru_fp32"]),
    }
    if "loop_fp32" in timings:
        ratios = {"custom_bf16_over_loop_fp32": speed_ratio(custom_bf16, timings["loop_fp32"])} | ratios
        for recurrence in ("diagonal", "block"):
            ratios[f"{recurrence}_over_full_bf16"] = speed_ratio(timings[f"{recurrence}_bf16"], custom_bf16)
    return ratios
