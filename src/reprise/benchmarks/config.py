"""Which benchmark runs, how often and at which sizes."""

from dataclasses import dataclass, field

from reprise.benchmarks.timing import Pace
from reprise.runtime import UserError, check_one_of

NAMES = ("recurrence", "resets", "loss", "scan", "step")
# Which further sizes the recurrence is measured at: none, one dimension away from the main size, all combinations.
CASES = ("main", "cross", "grid")
# Below this a median and its quartiles say little.
MIN_REPETITIONS = 9


@dataclass
class BenchmarkConfig:
    """Sizes that a benchmark does not name in its description are not read by it."""

    name: str = "recurrence"
    # Timed repetitions of every side, and calls before them that are not timed.
    repetitions: int = 11
    warmup: int = 2
    # A repetition makes as many calls as fill this time, so that no reading of the clock is about a single short one.
    min_repetition_ms: float = 50.0
    # Width of a cell's input and state, rows and positions of a window.
    width: int = 512
    num_rows: int = 32
    num_steps: int = 128
    cases: str = "cross"
    widths: list[int] = field(default_factory=lambda: [256, 512, 1024])
    rows: list[int] = field(default_factory=lambda: [1, 8, 32, 128])
    # Words and tokens of the output layer.
    vocab_size: int = 8192
    num_tokens: int = 4096
    # Length of the documents that resets keep apart.
    document_tokens: int = 64

    def __post_init__(self) -> None:
        check_one_of("benchmark.name", self.name, allowed=NAMES)
        check_one_of("benchmark.cases", self.cases, allowed=CASES)
        if self.repetitions < MIN_REPETITIONS:
            raise UserError(f"benchmark.repetitions={self.repetitions}: at least {MIN_REPETITIONS}")
        if self.min_repetition_ms < 0:
            raise UserError(f"benchmark.min_repetition_ms={self.min_repetition_ms}: at least 0")
        for key in ("warmup", "width", "num_rows", "num_steps", "num_tokens", "document_tokens"):
            if getattr(self, key) < 1:
                raise UserError(f"benchmark.{key}={getattr(self, key)}: at least 1")
        if self.vocab_size < 2:
            raise UserError(f"benchmark.vocab_size={self.vocab_size}: at least 2")
        for key in ("widths", "rows"):
            if any(value < 1 for value in getattr(self, key)):
                raise UserError(f"benchmark.{key}={getattr(self, key)}: each at least 1")
        if self.document_tokens > self.num_steps:
            raise UserError(
                f"benchmark.document_tokens={self.document_tokens}: at most benchmark.num_steps={self.num_steps}"
            )

    def pace(self) -> Pace:
        """How often every side runs."""
        return Pace(self.repetitions, self.warmup, self.min_repetition_ms / 1000)

    def further_sizes(self) -> list[tuple[int, int]]:
        """(width, rows) of the sizes beside the main one, small ones first."""
        if self.cases == "main":
            return []
        every = [(width, rows) for width in self.widths for rows in self.rows]
        if self.cases == "cross":
            every = [(width, rows) for width, rows in every if width == self.width or rows == self.num_rows]
        return [size for size in every if size != (self.width, self.num_rows)]
