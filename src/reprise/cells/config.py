"""Which cell a layer is made of, typed, and what each kind refuses by name."""

from dataclasses import dataclass

from reprise.cells.attention import TransformerCell, TransformerEncoderCell
from reprise.cells.base import Cell
from reprise.cells.gated import GruCell, LstmCell
from reprise.cells.scanned import MinGruCell, MinLstmCell, RgLruCell
from reprise.kernels.dispatch import IMPLEMENTATIONS
from reprise.runtime import UserError

CELLS: dict[str, type[Cell]] = {
    "lstm": LstmCell,
    "gru": GruCell,
    "mingru": MinGruCell,
    "minlstm": MinLstmCell,
    "rglru": RgLruCell,
    "transformer": TransformerCell,
    "transformer_encoder": TransformerEncoderCell,
}
_SWITCHES = ("coupled_gates", "layer_norm", "temporal_residual")


@dataclass
class CellConfig:
    """What recurs. A kind takes the switches and recurrences that its class names, in every combination."""

    kind: str = "lstm"
    # Input gate 1 - f: three quarters of the weights and products.
    coupled_gates: bool = True
    # Layer norm on the hidden state, after the skip.
    layer_norm: bool = True
    # A learned share of the previous hidden state, one number a unit, added to the new one.
    temporal_residual: bool = True
    # That share at the start.
    residual_init: float = 0.1
    # The norm's scale at the start. At one, the recurrent product begins with gates far from the middle.
    norm_init: float = 0.3
    # Which units' previous hidden state a unit hears. full: all; block: those of its head; diagonal: its own.
    recurrence: str = "full"
    # Heads of recurrence=block and of attention: they share the width equally.
    num_heads: int = 4
    # Positions before its own that attention reaches; the Transformer only.
    context: int = 256
    # auto: the fastest that runs, see `kernels.dispatch.pick`.
    implementation: str = "auto"
    # Added to the forget gate at the start (Jozefowicz et al. 2015); the LSTM only.
    forget_bias: float = 1.0

    def __post_init__(self) -> None:
        _check_name("kind", self.kind, tuple(CELLS))
        cell = CELLS[self.kind]
        _check_name("recurrence", self.recurrence, cell.recurrences)
        _check_name("implementation", self.implementation, IMPLEMENTATIONS)
        for key in ("num_heads", "context"):
            if getattr(self, key) < 1:
                raise UserError(f"model.cell.{key}={getattr(self, key)}: allowed: 1 or more")
        for name in self.switches():
            if name not in cell.switches:
                raise UserError(f"model.cell.{name}=true: a {self.kind} has no such switch; allowed: false")
        if self.implementation == "library" and self.kernel_switches():
            raise UserError(
                f"model.cell.implementation=library: the library has no {', '.join(self.kernel_switches())}; "
                "allowed: auto, native, triton, eager, reference"
            )

    def switches(self) -> tuple[str, ...]:
        """Names of the switches that are on."""
        return tuple(name for name in _SWITCHES if getattr(self, name))

    def kernel_switches(self) -> tuple[str, ...]:
        """What the library's cells lack of what is asked for: the switches, and a recurrence that is not full."""
        return self.switches() + (() if self.recurrence == "full" else (self.recurrence,))

    def heard_units(self, width: int) -> int:
        """How many units of the previous hidden state one unit hears, of a state of `width`."""
        if self.recurrence == "block":
            return self.head_width(width)
        return width if self.recurrence == "full" else 1

    def head_width(self, width: int) -> int:
        """Units of one head. Raises UserError where the heads cannot share the width equally."""
        if width % self.num_heads != 0:
            raise UserError(
                f"model.cell.num_heads={self.num_heads}: does not divide model.width={width}; "
                f"allowed: a divisor of {width}"
            )
        return width // self.num_heads

    def build(self, width_in: int, width: int) -> Cell:
        """One layer with inputs of `width_in` and a state of `width`."""
        return CELLS[self.kind](self, width_in, width)


def _check_name(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"model.cell.{key}={value}: unknown; allowed: {', '.join(allowed)}")
