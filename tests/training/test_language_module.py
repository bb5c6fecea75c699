"""The training step: weighted by tokens over ranks and groups, with a state that is carried and is no module's."""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import pytest
import torch
from torch import Tensor

from reprise.cells.config import CellConfig
from reprise.data.lanes import LaneReader
from reprise.distributed.membership import lane_groups, lanes_of_rank
from reprise.models import LanguageModel
from reprise.runtime import World
from reprise.training.budget import Budget
from reprise.training.datamodule import Batch, read_batch
from reprise.training.language_module import LaneStates, LanguageModule
from reprise.training.optim import OptimConfig, ScheduleConfig
from reprise.training.recovery_state import put_lane_states

NUM_LANES, WINDOW, VOCAB_SIZE = 6, 8, 40
MakeModel = Callable[..., LanguageModel]


@dataclass
class Stream:
    """One long document: 6 lanes of 25 or 26 tokens, so the last of 4 windows has unequal counts in its lanes."""

    tokens: np.ndarray
    doc_offsets: np.ndarray


@pytest.fixture
def reader() -> LaneReader:
    tokens = np.random.default_rng(0).integers(1, VOCAB_SIZE, 153).astype(np.uint16)
    tokens[[40, 152]] = 0
    stream = Stream(tokens, np.array([0, 41, 153]))
    return LaneReader(stream, num_lanes=NUM_LANES, window=WINDOW, seed=1, eos_id=0, shuffle=False)


def make_module(
    model: LanguageModel, *, world: World | None = None, accumulate: int = 1, label_smoothing: float = 0.0
) -> LanguageModule:
    world = world or World()
    module = LanguageModule(
        model,
        optim=OptimConfig(),
        schedule=ScheduleConfig(),
        budget=Budget(10, None),
        world=world,
        lanes=lanes_of_rank(NUM_LANES, rank=world.rank, num_ranks=world.size),
        accumulate=accumulate,
        seed=5,
        identity={},
        label_smoothing=label_smoothing,
    )
    module.on_fit_start()
    return module


def gradients_of_step(module: LanguageModule, reader: LaneReader, step: int) -> tuple[list[Tensor], float]:
    """This rank's gradients after the step's groups, divided as Lightning divides them, and its part of the loss."""
    module.model.zero_grad()
    loss = 0.0
    for index, lanes in enumerate(lane_groups(module.lanes, module.accumulate)):
        part = module.training_step(read_batch(reader, step, lanes), index) / module.accumulate
        part.backward()
        loss += part.item()
    grads = [parameter.grad for parameter in module.model.parameters()]
    assert all(grad is not None for grad in grads)
    return [grad.clone() for grad in grads if grad is not None], loss


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("num_ranks", "accumulate"), [(1, 2), (1, 5), (2, 1), (3, 2), (4, 1)])
def test_ranks_and_groups_add_up_to_the_gradient_of_one_whole_batch(
    make_model: MakeModel, reader: LaneReader, step: int, dropout: float, num_ranks: int, accumulate: int
) -> None:
    fields = {"dropout": dropout, "embedding_dropout": dropout}
    expected, whole_loss = gradients_of_step(make_module(make_model(VOCAB_SIZE, **fields)), reader, step)
    parts, losses = [], []
    for rank in range(num_ranks):
        world = World(rank, num_ranks, rank, num_ranks)
        module = make_module(make_model(VOCAB_SIZE, **fields), world=world, accumulate=accumulate)
        grads, loss = gradients_of_step(module, reader, step)
        parts.append(grads)
        losses.append(loss)
    # DistributedDataParallel takes the mean over ranks.
    for index, gradient in enumerate(expected):
        mean = torch.stack([part[index] for part in parts]).mean(0)
        assert (mean - gradient).norm() <= 1e-5 * gradient.norm()
    assert sum(losses) / num_ranks == pytest.approx(whole_loss, rel=1e-5)


def test_lanes_of_the_last_window_are_unequal(reader: LaneReader) -> None:
    batch = read_batch(reader, 3, range(NUM_LANES))
    assert set((batch.targets_BT >= 0).sum(1).tolist()) == {1, 2}


def test_label_smoothing_is_for_training_only(make_model: MakeModel, reader: LaneReader) -> None:
    batch = read_batch(reader, 0, range(NUM_LANES))
    modules = [make_module(make_model(VOCAB_SIZE), label_smoothing=share) for share in (0.0, 0.2)]
    plain, smooth = (module.training_step(batch, 0).item() for module in modules)
    assert abs(plain - smooth) > 1e-4
    for module in modules:
        module.on_validation_epoch_start()
        with torch.no_grad():
            module.validation_step(batch, 0)
        assert module.eval_tally.loss == pytest.approx(plain, rel=1e-6)


def test_loss_is_the_mean_over_targets(make_model: MakeModel, reader: LaneReader) -> None:
    model = make_model(VOCAB_SIZE)
    module, batch = make_module(model), read_batch(reader, 3, range(NUM_LANES))
    loss = module.training_step(batch, 0)
    hidden_BTD, _ = model(batch.tokens_BT, model.initial_state(NUM_LANES), batch.reset_BT)
    logits_NV = model.logits(hidden_BTD).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits_NV, batch.targets_BT.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected)
    assert module.log_window.tally.num_tokens == batch.num_targets
    assert module.log_window.tally.loss == pytest.approx(loss.item(), rel=1e-6)


def test_state_is_carried_between_windows_and_cut_from_the_gradient(make_model: MakeModel, reader: LaneReader) -> None:
    model = make_model(VOCAB_SIZE)
    module = make_module(model)
    state = model.initial_state(NUM_LANES)
    for step in range(3):
        batch = read_batch(reader, step, range(NUM_LANES))
        module.training_step(batch, step).backward()
        with torch.no_grad():
            _, state = model(batch.tokens_BT, state, batch.reset_BT)
    assert module.train_states is not None
    carried = module.train_states.take(0, NUM_LANES)
    for layer, expected_layer in zip(carried, state, strict=True):
        for tensor, expected in zip(layer, expected_layer, strict=True):
            assert not tensor.requires_grad and tensor.dtype == torch.float32
            torch.testing.assert_close(tensor, expected)


def test_lane_states_are_no_buffers_and_in_no_state_dict(make_model: MakeModel, reader: LaneReader) -> None:
    model = make_model(VOCAB_SIZE)
    module = make_module(model)
    module.training_step(read_batch(reader, 0, range(NUM_LANES)), 0)
    assert list(module.buffers()) == []
    assert set(module.state_dict()) == {f"model.{name}" for name in model.state_dict()}


def states_of(module: LanguageModule) -> list[Tensor]:
    assert module.train_states is not None
    return [tensor.clone() for layer in module.train_states.take(0, NUM_LANES) for tensor in layer]


def test_evaluation_does_not_disturb_training(make_model: MakeModel, reader: LaneReader) -> None:
    def run(evaluate: bool) -> tuple[list[float], list[Tensor], Tensor]:
        torch.manual_seed(11)
        module = make_module(make_model(VOCAB_SIZE, dropout=0.3))
        losses = []
        for step in range(4):
            losses.append(module.training_step(read_batch(reader, step, range(NUM_LANES)), step).item())
            if evaluate:
                before = states_of(module)
                module.on_validation_epoch_start()
                with torch.no_grad():
                    for index in range(reader.steps_per_epoch):
                        module.validation_step(read_batch(reader, index, range(NUM_LANES)), index)
                assert all(map(torch.equal, states_of(module), before))
                assert module.eval_tally.num_tokens == reader.tokens_per_epoch
        return losses, states_of(module), torch.get_rng_state()

    (losses, states, generator), (plain_losses, plain_states, plain_generator) = run(True), run(False)
    assert losses == plain_losses
    assert all(map(torch.equal, states, plain_states))
    assert torch.equal(generator, plain_generator)


def test_each_evaluation_starts_from_zero(make_model: MakeModel, reader: LaneReader) -> None:
    module = make_module(make_model(VOCAB_SIZE, dropout=0.5))
    sums = []
    for start in (module.on_validation_epoch_start, module.on_test_epoch_start, module.on_validation_epoch_start):
        start()
        with torch.no_grad():
            for step in range(reader.steps_per_epoch):
                module.test_step(read_batch(reader, step, range(NUM_LANES)), step)
        sums.append(module.eval_tally.nll_sum)
    assert sums[0] == sums[1] == sums[2]


def test_dropout_is_that_of_the_step_and_the_lane(make_model: MakeModel, reader: LaneReader) -> None:
    def loss(step: int, batch: Batch) -> float:
        batch.step = step
        return make_module(make_model(VOCAB_SIZE, dropout=0.5)).training_step(batch, 0).item()

    batch = read_batch(reader, 0, range(NUM_LANES))
    assert loss(0, batch) == loss(0, batch)
    assert loss(0, batch) != loss(1, batch)


def test_saved_states_go_to_whoever_owns_the_lane_now() -> None:
    saved = [[torch.arange(12.0).reshape(6, 2), torch.arange(12.0).reshape(6, 2) + 100]]
    for lanes in (range(6), range(3), range(3, 6), range(5, 6)):
        states = LaneStates(lanes, ((torch.zeros(len(lanes), 2), torch.zeros(len(lanes), 2)),))
        put_lane_states(states, saved)
        hidden, memory = states.take(lanes.start, len(lanes))[0]
        assert torch.equal(hidden, saved[0][0][lanes.start : lanes.stop])
        assert torch.equal(memory, saved[0][1][lanes.start : lanes.stop])


def test_caches_of_a_transformer_are_saved_and_go_to_other_ranks_as_hidden_states_do(
    make_model: MakeModel, reader: LaneReader
) -> None:
    # Longer than two windows, so that the cache fills up over several of them.
    cell = CellConfig("transformer", False, False, False, num_heads=2, context=20)
    module = make_module(make_model(VOCAB_SIZE, cell=cell))
    for step in range(3):
        module.training_step(read_batch(reader, step, range(NUM_LANES)), step).backward()
    assert module.train_states is not None
    buffer = BytesIO()
    torch.save([list(layer) for layer in module.train_states.take(0, NUM_LANES)], buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert all(part.dtype == torch.float32 and not part.requires_grad for layer in saved for part in layer)
    expected, whole_loss = gradients_of_step(module, reader, 3)
    parts, losses = [], []
    for rank in range(2):
        other = make_module(make_model(VOCAB_SIZE, cell=cell), world=World(rank, 2, rank, 2))
        assert other.train_states is not None
        put_lane_states(other.train_states, saved)
        grads, loss = gradients_of_step(other, reader, 3)
        parts.append(grads)
        losses.append(loss)
    for index, gradient in enumerate(expected):
        mean = torch.stack([part[index] for part in parts]).mean(0)
        assert (mean - gradient).norm() <= 1e-5 * gradient.norm()
    assert sum(losses) / 2 == pytest.approx(whole_loss, rel=1e-5)
    empty = make_module(make_model(VOCAB_SIZE, cell=cell))
    assert gradients_of_step(empty, reader, 3)[1] != pytest.approx(whole_loss, rel=1e-4)
