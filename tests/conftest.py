"""What all tests share: few threads, nothing of the machine's own, and slow tests only when asked for."""

import os

import pytest

# Before torch is imported: tests run side by side, and a thread pool a process would make them wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Neither the ranks of an agent that started pytest nor a tracker's key may reach a test, or a run that it starts.
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WANDB_API_KEY", "WANDB_MODE"):
    os.environ.pop(name, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out of a plain `pytest`; `pytest -m slow`, or a test's own name, runs them."""
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
