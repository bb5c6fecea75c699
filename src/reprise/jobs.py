"""How a command becomes a job: checked first, then run in this process or on ranks started for it, and swept."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from reprise.config import RANKED_TASKS, Config, load
from reprise.evaluation.report import headline
from reprise.evaluation.sweep_table import SweepTable
from reprise.runtime import UserError, World, is_rank, launch_ranks, leave_world, say
from reprise.tasks import TASKS, Result
from reprise.training.checkpoint import find_checkpoint
from reprise.training.metrics_file import check_installed
from reprise.training.weights import model_identity, read_weights


def start(tree: DictConfig, overrides: Sequence[str], *, command: str, sweep: str | None) -> float | None:
    """Run a job where it belongs: in this process, or on ranks started for it.

    Args:
        tree: the job's settings as Hydra composed them.
        overrides: the words of the command that set them.
        command: path of run.py, which the ranks run again.
        sweep: the sweep's folder when this is one job of many, else None.

    Returns:
        The sweep objective, validation loss, where the task has one.
    """
    if sweep is not None and is_rank():
        # A job that fails on one rank would leave the others behind in its collectives while that rank goes on.
        raise UserError("-m starts the ranks of every job itself: python run.py -m ... cluster.devices=2, no torchrun")
    if sweep is None:
        result = run_or_launch(load(tree), overrides, command=command, own_process=False)
    else:
        with SweepTable(Path(sweep)).job(overrides) as record:
            config = load(tree)
            run = config.run_folder()
            record["run"] = str(run.path)
            finished = None if config.fresh else run.result()
            if finished is not None:
                say(f"{run.path} is finished ({headline(finished)})")
            # A process a job: trackers, generators and memory of one never reach the next.
            result = finished or run_or_launch(config, overrides, command=command, own_process=True)
            record.update(result)
    return result.get("val/loss")


def run_or_launch(config: Config, overrides: Sequence[str], *, command: str, own_process: bool) -> Result:
    """Run the task here, or run this very command again as `cluster.devices` ranks and read the result they leave.

    Raises:
        UserError: what `check` finds, and more than one node without an agent that started this rank.
    """
    check(config)
    is_ranked = config.task.name in RANKED_TASKS
    if World.from_environment().rank != 0 and not is_ranked:
        return {}
    num_ranks = config.cluster.devices if is_ranked else 1
    if num_ranks > 1 and config.cluster.nodes > 1 and not is_rank():
        raise UserError(
            f"cluster.nodes={config.cluster.nodes}: start it on every node, by"
            f" torchrun --nnodes {config.cluster.nodes} run.py ..."
        )
    if is_rank() or (num_ranks == 1 and not own_process):
        try:
            result = TASKS[config.task.name](config, overrides)
        except (UserError, SystemExit):
            # Every rank raises it, after the last collective it has begun.
            leave_world()
            raise
        leave_world()
        return result
    launch_ranks([command, *overrides], num_ranks=num_ranks)
    left = config.run_folder().result()
    assert left is not None, "ranks that end well leave a result"
    return left


def check(config: Config) -> None:
    """Say before any work starts what can be known to fail.

    Raises:
        UserError: a checkpoint that is not there or of another model, a tracker or a GPU that is missing.
    """
    if config.checkpoint.load is not None:
        path = find_checkpoint(config.checkpoint.load)
        if config.task.name == "pretrain":
            read_weights(path, model_identity(config.model))
    check_installed(config.logger)
    if config.task.name in (*RANKED_TASKS, "benchmark"):
        config.cluster.check_devices()
