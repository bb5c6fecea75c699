"""A training step without Lightning: the same module, data, loss, clipping and optimizer, and its parts' times.

Legend: B rows, T time, D width.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from reprise.benchmarks.machine import Place
from reprise.training.datamodule import Batch
from reprise.training.session import Session

PRODUCTS = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": torch.float32}

Lap = Callable[[str], None]


def _no_lap(part: str) -> None:
    """Nobody asks for the parts."""


class TrainingStep:
    """A call reads a batch, computes loss and gradients, clips, and updates the weights of a session's model."""

    def __init__(self, session: Session, place: Place) -> None:
        self.module = session.module
        self.model = session.module.model
        self.precision = session.precision
        self.product = PRODUCTS[session.precision]
        self._settings = session.settings
        self._session = session
        self._place = place
        self.module.to(place.device)
        self.module.on_fit_start()
        # A gradient scaler comes between, as in training.
        is_scaled = self.precision == "16-mixed"
        self._optimizer = self._settings.optim.build(self.model, fused=not is_scaled)
        self._scaler = torch.amp.GradScaler(place.device.type, enabled=is_scaled)
        self._batches = self.batches()
        self._num_steps = 0

    def batches(self) -> Iterator[Batch]:
        """Batches of training from the first on, on the device."""
        for batch in self._session.datamodule.train_dataloader():
            yield replace(
                batch,
                **{
                    name: getattr(batch, name).to(self._place.device)
                    for name in ("tokens_BT", "targets_BT", "reset_BT")
                },
            )

    def __call__(self, lap: Lap = _no_lap) -> None:
        """`lap(part)` is called when a part ends; hooks on the model's modules may call it too."""
        accumulate = self._settings.train.accumulate
        # First, since whoever used the model before may have left gradients.
        self._optimizer.zero_grad()
        for index in range(accumulate):
            batch = next(self._batches)
            lap("data")
            with self._place.autocast(self.product):
                loss = self.module.training_step(batch, index) / accumulate
            lap("loss forward")
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            lap("embedding backward")
        self._scaler.unscale_(self._optimizer)
        self.module.configure_gradient_clipping(self._optimizer, self._settings.train.clip_norm)
        lap("clip")
        factor = self._settings.schedule.factor(self._num_steps, None)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.optim.lr * factor
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._num_steps += 1
        lap("optimizer")


class Laps:
    """Times of the parts of a step, taken where one part hands over to the next.

    Forward, a module has ended when its forward hook runs. Backward, what comes after a tensor has ended when the
    tensor's gradient is there. On a GPU every lap waits for the device, which is why a step with laps is a side of its
    own and no measure of the whole.
    """

    def __init__(self, step: TrainingStep, place: Place) -> None:
        self._step = step
        self._place = place
        self._seconds: list[dict[str, float]] = []
        self._lap_s = 0.0

    def __call__(self) -> None:
        self._seconds.append(defaultdict(float))
        handles = self._hooks()
        self._place.synchronise()
        self._lap_s = time.perf_counter()
        try:
            self._step(self._lap)
        finally:
            for handle in handles:
                handle.remove()

    def medians(self, *, last: int) -> dict[str, float]:
        """Median seconds of every part over the last so many steps, in the order of the parts."""
        counted = self._seconds[-last:]
        return {part: statistics.median(seconds[part] for seconds in counted) for part in counted[-1]}

    def _lap(self, part: str) -> None:
        self._place.synchronise()
        now_s = time.perf_counter()
        self._seconds[-1][part] += now_s - self._lap_s
        self._lap_s = now_s

    def _hooks(self) -> list[Any]:
        """Forward hooks on the embedding and the layers; each puts a hook on the gradient of what the module gave."""
        model = self._step.model
        names = ["embedding", *(f"layer {index}" for index in range(len(model.layers)))]
        # Once the gradient of a module's output is known, the backward of the one after it is over.
        followers = [*names[1:], "loss"]
        modules: list[nn.Module] = [model.embedding, *model.layers]
        return [
            module.register_forward_hook(self._forward_hook(name, follower))
            for module, name, follower in zip(modules, names, followers, strict=True)
        ]

    def _forward_hook(self, name: str, follower: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self._lap(f"{name} forward")
            y_BTD: Tensor = output[0] if isinstance(output, tuple) else output
            y_BTD.register_hook(lambda grad: self._lap(f"{follower} backward"))  # type: ignore[no-untyped-call]

        return hook
