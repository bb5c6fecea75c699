"""Size of the updates beside the size of the weights, and steps skipped for an overflow."""

import lightning.pytorch as lightning
import torch
from torch import Tensor

from reprise.runtime import UserError
from reprise.training.callbacks.steps import StepCallback
from reprise.training.callbacks.throughput import StepMetrics
from reprise.training.language_module import LanguageModule

# So many skipped steps in a row mean that the loss scale is not the trouble.
MAX_SKIPPED_IN_A_ROW = 40


class GradientMonitor(StepCallback):
    """`optim/update_ratio` (norm of the update over norm of the weights) on log steps; loss scale and skipped steps."""

    def __init__(self, metrics: StepMetrics) -> None:
        self.metrics = metrics
        self._before: list[Tensor] | None = None
        self._scale_before = 0.0
        self._skipped_in_a_row = 0

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.metrics.is_log_step(trainer.global_step + 1):
            self._before = [parameter.detach().clone() for parameter in module.parameters()]
        self._scale_before = _loss_scale(trainer)

    def on_step_end(self, trainer: lightning.Trainer, module: LanguageModule) -> None:
        if self._scale_before:
            self._count_skipped(trainer, module)
        if self._before is not None:
            after = [parameter.detach() for parameter in module.parameters()]
            change = torch._foreach_norm(torch._foreach_sub(after, self._before))
            weight = torch._foreach_norm(after)
            ratio = torch.stack(change).norm() / torch.stack(weight).norm()
            self.metrics.values["optim/update_ratio"] = float(ratio)
            self._before = None

    def _count_skipped(self, trainer: lightning.Trainer, module: LanguageModule) -> None:
        scale = _loss_scale(trainer)
        # The scaler lowers its scale exactly when it skipped the step.
        skipped = scale < self._scale_before
        module.skipped_steps += int(skipped)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self.metrics.values["optim/loss_scale"] = scale
        self.metrics.values["optim/skipped_steps"] = float(module.skipped_steps)
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"cluster.precision=16-mixed: {self._skipped_in_a_row} steps in a row overflowed, the last at step"
                f" {trainer.global_step} with loss scale {scale:g}; try cluster.precision=bf16-mixed or a lower"
                " optim.lr"
            )


def _loss_scale(trainer: lightning.Trainer) -> float:
    """The gradient scaler's scale, 0 where there is no scaler."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 0.0 if scaler is None else float(scaler.get_scale())
