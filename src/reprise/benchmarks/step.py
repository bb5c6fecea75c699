"""`benchmark=step`: the whole training step of a model, where its time goes, and its share of the machine's limit.

Legend: T time, B rows.
"""

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reprise.benchmarks.config import BenchmarkConfig
from reprise.benchmarks.machine import Place, product_sides, short_name
from reprise.benchmarks.outcome import Outcome, plain_table, rates_table
from reprise.benchmarks.rivals import WordLanguageModel, WordModelTraining
from reprise.benchmarks.timing import Side, Spread, Timing, Timings, interleave, speed_ratio, work_ratio
from reprise.benchmarks.training_step import Laps, TrainingStep
from reprise.benchmarks.windows import cell_implementation, implementation_of
from reprise.data.shards import Corpus
from reprise.evaluation.report import read_curves
from reprise.kernels.dispatch import KERNELS, pick
from reprise.models import LanguageModel
from reprise.runtime import RunFolder, World, say
from reprise.training.budget import Budget
from reprise.training.checkpoint import CheckpointConfig
from reprise.training.loggers import build_loggers
from reprise.training.metrics_file import LoggerConfig
from reprise.training.session import Session, Settings

# A run of the real loop is this many log windows; the last one counts, when everything is warm.
_LOOP_WINDOWS = 3
_LOOP_WINDOW_STEPS = 10
_PROFILED_STEPS = 10
_PROFILE_ROWS = 15
# Batches the rivals read again and again: their data is there for nothing.
_RIVAL_BATCHES = 8
# As in the usual tutorial; with clipping any rate is safe.
_RIVAL_LR, _RIVAL_CLIP_NORM = 1.0, 0.25


def measure(
    settings: BenchmarkConfig, place: Place, *, model: LanguageModel, corpus: Corpus, training: Settings
) -> Outcome:
    """The step by hand, its parts, the real loop, word language models, and large products, all in turn.

    Args:
        settings: how often; sizes are the model's and the data's own.
        place: where.
        model: what is trained.
        corpus: real tokens.
        training: the sections that training reads.
    """
    with tempfile.TemporaryDirectory(prefix="reprise_benchmark_") as folder:
        step = TrainingStep(_session(model, corpus, training, Path(folder) / "step", num_steps=None), place)
        tokens = training.data.num_lanes * training.data.window
        laps = Laps(step, place)
        facts = _facts(model, training, step, place)
        say(f"measuring steps of {tokens} tokens, {model.num_parameters():,} parameters, {step.precision}")
        sides = [
            Side("step", step, tokens, facts),
            Side("step_parts", laps, tokens, facts),
            Side("pretrain_loop", _Loop(model, corpus, training, Path(folder)), tokens, facts, has_own_clock=True),
            *_word_models(model, step, training, place),
            *product_sides(step.product, place),
        ]
        timings = interleave(sides, settings.pace(), synchronise=place.synchronise)
        outcome = _outcome(timings, model.flops_per_token() * tokens)
        outcome.findings |= {"parts": _parts(laps, timings, outcome), "profile": _profile(step, place, outcome)}
        outcome.findings |= {"precision": step.precision, "parameters": model.num_parameters()}
    return outcome


def _session(
    model: LanguageModel, corpus: Corpus, training: Settings, folder: Path, *, num_steps: int | None
) -> Session:
    """The real thing, in a folder of its own, that neither validates nor saves on the way."""
    train = replace(
        training.train,
        max_steps=num_steps,
        max_tokens=None,
        max_minutes=None,
        validate_every_steps=None,
        log_every_steps=_LOOP_WINDOW_STEPS,
    )
    checkpoint = CheckpointConfig(every_steps=None, every_minutes=None, keep_latest=1)
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    return Session(
        model,
        corpus,
        settings=replace(training, train=train, checkpoint=checkpoint),
        budget=Budget(num_steps, None),
        run=run,
        world=World(),
        identity={},
        loggers=build_loggers(LoggerConfig(), run, plain_config={}, group="benchmark"),
    )


class _Loop:
    """A short run of the real training loop; a call gives the seconds of a step, by the loop's own last log window."""

    def __init__(self, model: LanguageModel, corpus: Corpus, training: Settings, folder: Path) -> None:
        self._model, self._corpus, self._training, self._folder = model, corpus, training, folder
        self._num_runs = 0

    def __call__(self) -> float:
        self._num_runs += 1
        folder = self._folder / f"loop_{self._num_runs}"
        num_steps = _LOOP_WINDOWS * _LOOP_WINDOW_STEPS
        # What the loop says of its short runs would only hide what the benchmark has to say.
        with (
            _signal_handlers_kept(),
            open(self._folder / "loop.txt", "a", encoding="utf-8") as said,
            contextlib.redirect_stdout(said),
        ):
            session = _session(self._model, self._corpus, self._training, folder, num_steps=num_steps)
            session.fit()
            session.close()
        return read_curves(folder / "metrics.csv")[-1]["perf/step_ms"] / 1000


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """A run takes Ctrl-C and SIGTERM for itself; after it they end the benchmark again."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _facts(model: LanguageModel, training: Settings, step: TrainingStep, place: Place) -> dict[str, Any]:
    config = model.config
    loss = pick("linear_cross_entropy", place.device.type, step.product, "auto")
    ran = [f"{implementation_of('linear_cross_entropy', loss)} loss"]
    if config.cell.kind in KERNELS:
        ran.insert(0, f"{cell_implementation(config.cell, place, step.product)} {config.cell.kind}")
    return {
        "implementation": ", ".join(ran),
        "num_layers": config.num_layers,
        "width": config.width,
        "vocab_size": model.vocab_size,
        "num_rows": training.data.num_lanes,
        "num_steps": training.data.window,
        "products": short_name(step.product),
    }


def _word_models(model: LanguageModel, step: TrainingStep, training: Settings, place: Place) -> list[Side]:
    """The tutorial's model with the sizes of ours, and one that also makes our products at the output layer."""
    config = model.config
    embedding_width = model.embedding.embedding_dim
    batches = _time_first(step.batches(), training.train.accumulate)
    sides = []
    for name, tied in (("word_language_model", False), ("tied_word_language_model", True)):
        torch.manual_seed(config.width)
        rival = WordLanguageModel(
            model.vocab_size, embedding_width, width=config.width, num_layers=config.num_layers, tied=tied
        ).to(place.device)
        work = WordModelTraining(rival, batches, lr=_RIVAL_LR, clip_norm=_RIVAL_CLIP_NORM)
        facts = {"products": "fp32", "parameters": sum(parameter.numel() for parameter in rival.parameters())}
        facts["implementation"] = "nn.Embedding, nn.LSTM, nn.Linear"
        sides.append(Side(name, work, batches[0][0].numel(), facts))
    return sides


def _time_first(batches: Iterator[Any], accumulate: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets [T, B] of a few steps, the groups of a step side by side."""
    found = []
    for _ in range(_RIVAL_BATCHES):
        groups = [next(batches) for _ in range(accumulate)]
        tokens_BT = torch.cat([group.tokens_BT for group in groups])
        targets_BT = torch.cat([group.targets_BT for group in groups])
        found.append((tokens_BT.t().contiguous(), targets_BT.t().contiguous()))
    return found


def _outcome(timings: Timings, flops: int) -> Outcome:
    """Records and ratios. The ceiling is the rate of whichever large product is the fastest."""
    products = [timing for timing in timings.values() if "flops" in timing.side.facts]
    plain = [timing for timing in products if not timing.side.facts["is_packed"]]
    step, loop = timings["step"], timings["pretrain_loop"]
    outcome = Outcome()
    outcome.add("step", timings)
    outcome.ratios = {
        "step_over_ceiling": _share(step, flops, _quickest(plain)),
        "step_over_packed_ceiling": _share(step, flops, _quickest(products)),
        "step_over_word_language_model": speed_ratio(step, timings["word_language_model"]),
        "step_over_tied_word_language_model": speed_ratio(step, timings["tied_word_language_model"]),
        "pretrain_loop_over_step": speed_ratio(loop, step),
        "pretrain_loop_over_word_language_model": speed_ratio(loop, timings["word_language_model"]),
    }
    ceiling = _quickest(plain)
    outcome.findings = {
        "flops_per_step": flops,
        "step_tflops": flops / step.spread.median / 1e12,
        "ceiling_tflops": _tflops(ceiling),
        "ceiling_is": ceiling.side.name,
    }
    outcome.tables.append(
        rates_table("whole steps", {name: timing for name, timing in timings.items() if timing not in products})
    )
    rows = [(timing.side.name, f"{_tflops(timing):.3f}") for timing in products]
    rows.append(("the step", f"{flops / step.spread.median / 1e12:.3f}"))
    outcome.tables.append(plain_table("matrix products", ("product", "TFLOP/s"), rows))
    return outcome


def _share(step: Timing, flops: int, product: Timing) -> Spread:
    """Rate of the step's products over the rate of a large one, repetition by repetition."""
    return work_ratio(step, product, work=flops / product.side.facts["flops"])


def _quickest(products: list[Timing]) -> Timing:
    return max(products, key=_tflops)


def _tflops(product: Timing) -> float:
    return float(product.side.facts["flops"] / product.spread.median / 1e12)


def _parts(laps: Laps, timings: Timings, outcome: Outcome) -> list[dict[str, Any]]:
    """Median milliseconds of each part of a step and its share, in the order they happen."""
    timing = timings["step_parts"]
    medians = laps.medians(last=timing.num_calls * len(timing.seconds))
    total_s = sum(medians.values())
    parts: list[dict[str, Any]] = [
        {"part": name, "ms": 1000 * seconds, "share": seconds / total_s} for name, seconds in medians.items()
    ]
    rows = [(str(part["part"]), f"{part['ms']:.2f}", f"{100 * part['share']:.1f}%") for part in parts]
    outcome.tables.append(plain_table("where the time of a step goes", ("part", "ms", "share"), rows))
    return parts


def _profile(step: TrainingStep, place: Place, outcome: Outcome) -> list[dict[str, Any]]:
    """The operations that take most of a step by torch's profiler, their own time without what they call."""
    is_cuda = place.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(_PROFILED_STEPS):
            step()
        place.synchronise()
    found = []
    for event in profiler.key_averages():
        own_us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        found.append((float(own_us), str(event.key), int(event.count)))
    total_us = sum(own_us for own_us, _, _ in found)
    profile: list[dict[str, Any]] = [
        {
            "operation": name,
            "ms_per_step": own_us / 1000 / _PROFILED_STEPS,
            "share": own_us / total_us,
            "calls_per_step": count / _PROFILED_STEPS,
        }
        for own_us, name, count in sorted(found, reverse=True)[:_PROFILE_ROWS]
    ]
    rows = [
        (
            str(row["operation"])[:60],
            f"{row['ms_per_step']:.2f}",
            f"{100 * row['share']:.1f}%",
            f"{row['calls_per_step']:g}",
        )
        for row in profile
    ]
    outcome.tables.append(
        plain_table("operations, own time under the profiler", ("operation", "ms", "share", "calls"), rows)
    )
    return profile
