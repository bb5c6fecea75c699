"""Which cell a layer is made of, typed, and what each kind refuses by name."""

from dataclasses import dataclass

from reprise.cells.base import Cell
from reprise.cells.gated import GruCell, LstmCell
from reprise.kernels.dispatch import IMPLEMENTATIONS
from reprise.runtime import UserError

CELLS: dict[str, type[Cell]] = {"lstm": LstmCell, "gru": GruCell}
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
    # Which units a unit hears from. full: all of them.
    recurrence: str = "full"
    # auto: the library's where no switch is on, else eager.
    implementation: str = "auto"
    # Added to the forget gate at the start (Jozefowicz et al. 2015); the LSTM only.
    forget_bias: float = 1.0

    def __post_init__(self) -> None:
        _check_name("kind", self.kind, tuple(CELLS))
        cell = CELLS[self.kind]
        _check_name("recurrence", self.recurrence, cell.recurrences)
        _check_name("implementation", self.implementation, IMPLEMENTATIONS)
        for name in self.switches():
            if name not in cell.switches:
                raise UserError(f"model.cell.{name}=true: a {self.kind} has no such switch; allowed: false")
        if self.implementation == "library" and self.switches():
            raise UserError(
                f"model.cell.implementation=library: the library has no {', '.join(self.switches())}; "
                "allowed: auto, eager, reference"
            )

    def switches(self) -> tuple[str, ...]:
        """Names of the switches that are on."""
        return tuple(name for name in _SWITCHES if getattr(self, name))

    def build(self, width_in: int, width: int) -> Cell:
        """One layer with inputs of `width_in` and a state of `width`."""
        return CELLS[self.kind](self, width_in, width)


def _check_name(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"model.cell.{key}={value}: unknown; allowed: {', '.join(allowed)}")
