"""What exact resume needs and Lightning's checkpoint lacks: lane states, generators, the budget, clean counters."""

import random
from typing import TYPE_CHECKING, Any

import numpy
import torch

from reprise.runtime import RunFolder, UserError

if TYPE_CHECKING:
    from reprise.training.language_module import LaneStates, LanguageModule

KEY = "reprise"


def add(checkpoint: dict[str, Any], module: "LanguageModule") -> None:
    """Complete a checkpoint; every rank takes part, what rank 0 holds afterwards is written.

    Shapes: `lane_states` is one list a layer of tensors [num_lanes, D] fp32 in lane order, over all ranks.
    """
    assert module.train_states is not None
    own = {
        "first_lane": module.lanes.start,
        "lane_states": [
            [tensor.cpu() for tensor in layer]
            for layer in module.train_states.take(module.lanes.start, len(module.lanes))
        ],
        "generators": _generators(),
        "log_window": module.log_window.state_dict(),
    }
    ranks = _gather(own, module)
    step = module.trainer.global_step
    checkpoint[KEY] = {
        "identity": module.identity,
        "corpus": module.corpus_name,
        "skipped_steps": module.skipped_steps,
        "budget": module.budget.state_dict(),
        "lane_states": _join_lanes(ranks),
        "generators": [rank["generators"] for rank in ranks],
        "log_windows": [rank["log_window"] for rank in ranks],
        "precision": module.trainer.precision,
    }
    _set_progress(checkpoint["loops"]["fit_loop"], step=step, batches=step * module.accumulate)


def restore(checkpoint: dict[str, Any], module: "LanguageModule") -> None:
    """Take this rank's part back. Whose checkpoint it is, `Session.fit` has seen: it knows the file."""
    state = checkpoint[KEY]
    module.skipped_steps = state["skipped_steps"]
    module.budget.load_state_dict(state["budget"])
    module.loaded_states = state["lane_states"]
    # Summed over ranks at the next log step, so one rank takes it all, however many there were and are.
    module.log_window = type(module.log_window).joined(state["log_windows"] if module.world.rank == 0 else [])
    if module.world.rank < len(state["generators"]):
        _set_generators(state["generators"][module.world.rank])


def check_identity(saved: dict[str, Any], expected: dict[str, Any], *, where: str) -> None:
    """Raise a UserError that names the first setting in which a checkpoint differs from this run."""
    for key, value in expected.items():
        if saved.get(key) != value:
            raise UserError(
                f"{where}: saved with {key}={saved.get(key)}, this command has {key}={value};"
                " give the settings it was saved with, or another checkpoint"
            )


def check_same_text(saved: str, now: str, run: RunFolder) -> None:
    """A run's lanes are positions in a text; in another text they mean nothing.

    Raises:
        UserError: the run was made of another text than the same settings give now.
    """
    if saved != now:
        raise UserError(
            f"{run.path}: made of {saved}, but the text is now {now}; fresh=true starts over, name= keeps both"
        )


def put_lane_states(states: "LaneStates", saved: list[list[torch.Tensor]]) -> None:
    """Copy the saved state of this rank's lanes; which rank owned a lane when it was saved does not matter."""
    lanes = states.lanes
    rows = slice(lanes.start, lanes.stop)
    states.put(lanes.start, len(lanes), tuple(tuple(tensor[rows] for tensor in layer) for layer in saved))


def _gather(own: dict[str, Any], module: "LanguageModule") -> list[dict[str, Any]]:
    """Every rank's part on rank 0, in rank order; elsewhere only this rank's own."""
    if module.world.size == 1:
        return [own]
    parts: list[Any] | None = [None] * module.world.size if module.world.rank == 0 else None
    torch.distributed.gather_object(own, parts, dst=0)
    return [own] if parts is None else parts


def _join_lanes(ranks: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    ordered = sorted(ranks, key=lambda rank: rank["first_lane"])
    layers = range(len(ordered[0]["lane_states"]))
    return [
        [torch.cat(parts) for parts in zip(*(rank["lane_states"][layer] for rank in ordered), strict=True)]
        for layer in layers
    ]


def _generators() -> dict[str, Any]:
    """State of every global generator as plain data, so that it loads with `weights_only=True`."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_generators(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _set_progress(fit_loop: dict[str, Any], *, step: int, batches: int) -> None:
    """Make Lightning's counters say `batches` done, wherever in its loop the checkpoint was taken.

    A save before, inside or after a batch leaves them in different states, and each resumes differently: after some of
    them validation is left out once or the accumulation is off by a batch.
    """
    progress = fit_loop["epoch_loop.batch_progress"]
    for scope in ("total", "current"):
        for counter in progress[scope]:
            progress[scope][counter] = batches
    progress["is_last_batch"] = False
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step
