"""`benchmark=resets`: what it costs to begin documents anew inside a window, and whether that is exact.

Legend: B rows, T time, D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reprise.benchmarks.config import BenchmarkConfig
from reprise.benchmarks.machine import Place, short_name
from reprise.benchmarks.outcome import Outcome, plain_table, rates_table
from reprise.benchmarks.recurrence import CUSTOM
from reprise.benchmarks.rivals import packed_side
from reprise.benchmarks.timing import fastest, interleave, speed_ratio, time_ratio
from reprise.benchmarks.windows import Size, build_cell, cell_side, window_input, window_state
from reprise.runtime import say

_FORMATS = (torch.bfloat16, torch.float32)


def measure(settings: BenchmarkConfig, place: Place) -> Outcome:
    """The custom cell with and without resets, padding and packing around nn.LSTM, and documents run alone."""
    size = Size(settings.width, settings.num_rows, settings.num_steps)
    length = settings.document_tokens
    reset_BT = staggered_resets(size, length).to(place.device)
    say(f"measuring {size} (width x rows), {size.num_steps} positions, documents of {length}")
    sides = []
    for product in _FORMATS:
        name = short_name(product)
        sides.append(cell_side(f"none_{name}", CUSTOM, size=size, place=place, product=product))
        sides.append(cell_side(f"resets_{name}", CUSTOM, size=size, place=place, product=product, reset_BT=reset_BT))
        sides.append(packed_side(f"pad_pack_{name}", reset_BT, size=size, place=place, dtype=product))
    timings = interleave(sides, settings.pace(), synchronise=place.synchronise)
    outcome = Outcome(tables=[rates_table(f"{size.num_rows} rows of {size.num_steps} positions", timings)])
    outcome.add(str(size), timings)
    resets_bf16, resets_fp32 = timings["resets_bf16"], timings["resets_fp32"]
    packed = fastest(timings["pad_pack_bf16"], timings["pad_pack_fp32"])
    outcome.ratios = {
        f"resets_{length}_over_none": time_ratio(resets_bf16, timings["none_bf16"]),
        f"resets_{length}_over_pad_pack": speed_ratio(resets_bf16, packed),
        f"resets_{length}_bf16_over_pad_pack_fp32": speed_ratio(resets_bf16, timings["pad_pack_fp32"]),
        f"resets_{length}_fp32_over_none_fp32": time_ratio(resets_fp32, timings["none_fp32"]),
        f"resets_{length}_fp32_over_pad_pack_fp32": speed_ratio(resets_fp32, timings["pad_pack_fp32"]),
    }
    outcome.findings["pad_pack_is"] = packed.side.facts["implementation"]
    found = [compare_alone(size, place, reset_BT=reset_BT, product=product).plain() for product in _FORMATS]
    outcome.findings["documents_alone"] = found
    columns = ("products", "documents", "relative_rms", "bit_identical")
    rows = [tuple(str(row[column]) for column in columns) for row in found]
    outcome.tables.append(plain_table("a document in the window against the same document alone", columns, rows))
    return outcome


def staggered_resets(size: Size, length: int) -> Tensor:
    """[B, T] with a document every `length` positions, beginning elsewhere in every row, as in real windows."""
    offset_B1 = (torch.arange(size.num_rows) * length // size.num_rows).unsqueeze(1)
    return (torch.arange(size.num_steps) - offset_B1) % length == 0


@dataclass(frozen=True)
class Alone:
    """How far documents inside a window are from the same documents run alone, one row each."""

    product: torch.dtype
    num_documents: int
    relative_rms: float
    is_identical: bool

    def plain(self) -> dict[str, Any]:
        """As `result.json` has it."""
        return {
            "products": short_name(self.product),
            "documents": self.num_documents,
            "relative_rms": self.relative_rms,
            "bit_identical": self.is_identical,
        }


def compare_alone(size: Size, place: Place, *, reset_BT: Tensor, product: torch.dtype) -> Alone:
    """Outputs of every document that begins in the window, and the last states of those that end with it."""
    cell = build_cell(CUSTOM, size, place)
    x_BTD, state = window_input(size, place), window_state(size, place, num_parts=cell.state_parts)
    inside, alone = [], []
    with torch.no_grad(), place.autocast(product):
        y_BTD, last = cell(x_BTD, state, reset_BT)
        for row in range(size.num_rows):
            starts = reset_BT[row].nonzero()[:, 0].tolist()
            for start, stop in zip(starts, [*starts[1:], size.num_steps], strict=True):
                y_1TD, last_alone = cell(x_BTD[row : row + 1, start:stop], cell.initial_state(1), None)
                inside.append(y_BTD[row, start:stop].flatten())
                alone.append(y_1TD.flatten())
                if stop == size.num_steps:
                    inside += [part[row] for part in last]
                    alone += [part[0] for part in last_alone]
    inside_values = torch.cat([part.double() for part in inside])
    alone_values = torch.cat([part.double() for part in alone])
    difference = (inside_values - alone_values).square().mean().sqrt() / alone_values.square().mean().sqrt()
    num_documents = int(reset_BT.sum())
    return Alone(product, num_documents, float(difference), bool((inside_values == alone_values).all()))
