"""A window's launches as CUDA graphs: recorded once for a layout of tensors, then replayed with one call.

A recurrence on a GPU is two launches a position, each of a few microseconds of work, which Python cannot issue as fast
as they run. A graph has fixed addresses, so it owns a copy of all its tensors (its stage): what it reads is copied
there, and what it wrote is copied out. Windows go through it in pieces of at most _PIECE_STEPS positions, so that the
copies stay small and windows of many lengths share few graphs.

Nothing here waits for the GPU, except recording, once a layout, and forgetting the oldest layout where there are too
many. Where a graph cannot be recorded the launches are made one by one, which is said once.

Legend: T time.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from reprise.runtime import say

Tensors = dict[str, Tensor | None]

# The copies of a piece cost about as much as five launches; beyond this length a longer piece saves nothing.
_PIECE_STEPS = 64
# Shorter pieces are launched one by one.
_FEWEST_STEPS = 4
# Layouts kept, the longest unused goes first. A training run has about six: forward, backward, two lengths, validation.
# PyTorch has 32 streams to give, and every graph wants one.
_MOST_LAYOUTS = 16


class Window(NamedTuple):
    """The tensors of a run of positions, by the names that a kernel knows them by. None where an option is off."""

    # Read at every position.
    constants: Tensors
    # [T, ...], read at their position.
    inputs: Tensors
    # Carried from position to position, in place.
    state: Tensors
    # [T, ...], written at their position.
    results: Tensors

    @property
    def num_steps(self) -> int:
        """T."""
        return next(len(part) for part in self.results.values() if part is not None)

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return next(part.device for part in self.results.values() if part is not None)

    def tensors(self) -> Tensors:
        """All of them by name."""
        return self.constants | self.inputs | self.state | self.results

    def piece(self, start: int, stop: int) -> "Window":
        """Positions [start, stop): views where a tensor has a time, the tensor itself elsewhere."""

        def cut(parts: Tensors) -> Tensors:
            return {name: None if part is None else part[start:stop] for name, part in parts.items()}

        return Window(self.constants, cut(self.inputs), self.state, cut(self.results))

    def layout(self) -> Hashable:
        """Names, shapes and formats. The tensors are contiguous."""
        return tuple(
            (name, None if part is None else (part.shape, part.dtype)) for name, part in self.tensors().items()
        )


Steps = Callable[[Window], None]


def run(steps: Steps, window: Window, *, backwards: bool = False) -> None:
    """Call `steps` on the pieces of a window, the last piece first if `backwards`; through graphs on a GPU.

    `steps` issues launches and nothing else, and is equal to another of the same work (a frozen dataclass, say).
    """
    if not can_record(window.device):
        steps(window)
        return
    num_pieces = -(-window.num_steps // _PIECE_STEPS)
    edges = [index * window.num_steps // num_pieces for index in range(num_pieces + 1)]
    spans = list(pairwise(edges))
    for start, stop in reversed(spans) if backwards else spans:
        _run_piece(steps, window.piece(start, stop))


def can_record(device: torch.device) -> bool:
    """Whether the device has graphs, and the current stream is free: not while somebody else records it."""
    if device.type != "cuda":
        return False
    if torch.cuda.is_current_stream_capturing():
        _say_once("recurrent kernels: inside another CUDA graph's capture; launched one by one")
        return False
    return True


class _Recording(NamedTuple):
    """A graph, as a call that replays it, the stream it was recorded on, and the tensors at its addresses."""

    stage: Window
    stream: torch.cuda.Stream
    replay: Callable[[], None]

    def run(self, piece: Window) -> None:
        """What the graph does, on the piece's tensors."""
        _copy(self.stage.constants | self.stage.inputs | self.stage.state, piece.tensors())
        self.replay()
        _copy(piece.state | piece.results, self.stage.tensors())


# What became of a layout: seen once (None), recorded, or not to be recorded (False).
_recordings: OrderedDict[Hashable, "_Recording | bool | None"] = OrderedDict()
# Two threads on one stream would share a stage, and only one graph of a process may be recorded at a time.
_lock = Lock()


def _run_piece(steps: Steps, piece: Window) -> None:
    if piece.num_steps < _FEWEST_STEPS:
        steps(piece)
        return
    key = (steps, piece.layout(), piece.device, _stream(piece.device))
    with _lock:
        # A layout that comes once (the last batch of an epoch) is not worth a recording.
        known = key in _recordings
        recording = _recordings.setdefault(key, None)
        _recordings.move_to_end(key)
        if len(_recordings) > _MOST_LAYOUTS:
            _forget_oldest()
        if known and recording is None:
            recording = _recordings[key] = _recorded(steps, piece)
        if isinstance(recording, _Recording):
            recording.run(piece)
        else:
            steps(piece)


def _stream(device: torch.device) -> int:
    """Which stream launches go to: two streams at once must not share a stage."""
    return torch.cuda.current_stream(device).stream_id


def _forget_oldest() -> None:
    _, oldest = _recordings.popitem(last=False)
    if isinstance(oldest, _Recording):
        # It may be running still.
        _wait(oldest.stage.device)


def _wait(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def _recorded(steps: Steps, piece: Window) -> "_Recording | bool":
    """The piece's launches as a graph on tensors of its own, or False where that fails, said once."""
    try:
        # What is made for inference alone, training could not write to.
        with torch.inference_mode(False):
            stage = Window(
                *(
                    {name: None if part is None else torch.empty_like(part) for name, part in parts.items()}
                    for parts in piece
                )
            )
        stream = _unused_stream(piece.device)
        return _Recording(stage, stream, record(steps, stage, stream))
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        _say_once(f"recurrent kernels: no CUDA graph ({reason}); launched one by one, several times slower")
        return False


def record(steps: Steps, stage: Window, stream: torch.cuda.Stream) -> Callable[[], None]:
    """Record on `stream` what `steps` launches on `stage`; the result replays it on the stream current by then."""
    # Once for real: kernels are compiled and libraries set up on first use, which is not allowed while recording, and a
    # thread has its own set-up.
    steps(stage)
    graph = torch.cuda.CUDAGraph()
    # The outer context goes back to this stream also where recording fails, as the inner one does not. Other threads (a
    # loader that pins memory, NCCL's watchdog) go on meanwhile.
    with (
        torch.cuda.stream(torch.cuda.current_stream(stage.device)),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        steps(stage)
    return graph.replay


def _unused_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no living graph was recorded on, nor the current one.

    PyTorch keeps a workspace of the matrix products for each stream and frees it with any graph that was recorded on
    that stream: two graphs of one stream would share theirs, and lose it together.
    """
    taken = [known.stream for known in _recordings.values() if isinstance(known, _Recording)]
    taken.append(torch.cuda.current_stream(device))
    return next(stream for stream in _streams(device) if stream not in taken)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """One more than graphs that live at once."""
    return tuple(torch.cuda.Stream(device) for _ in range(_MOST_LAYOUTS + 1))  # type: ignore[no-untyped-call]


def _copy(targets: Tensors, sources: Tensors) -> None:
    """Every target from the source of its name."""
    pairs = [(part, sources[name]) for name, part in targets.items() if part is not None]
    torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs if source is not None])


@cache
def _say_once(message: str) -> None:
    say(message)
