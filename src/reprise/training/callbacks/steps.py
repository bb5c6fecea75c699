"""The end of an optimizer step, for the callbacks that act there."""

from typing import Any

import lightning.pytorch as lightning

from reprise.training.datamodule import Batch
from reprise.training.language_module import LanguageModule


class StepCallback(lightning.Callback):
    """Lightning counts batches, of which a step takes one for every group of lanes; what hangs on steps goes here."""

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        module: lightning.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_index: int,
    ) -> None:
        assert isinstance(module, LanguageModule)
        if (batch_index + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step_end(trainer, module)

    def on_step_end(self, trainer: lightning.Trainer, module: LanguageModule) -> None:
        """After the last group of step `trainer.global_step`, whose update has been made or skipped."""
        raise NotImplementedError
