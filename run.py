"""Entry point: `python run.py task=<task> key=value ...`; README.md shows the commands."""

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from reprise import config, tasks
from reprise.runtime import RanksFailed, UserError, end_with_launcher


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(tree: DictConfig) -> float | None:
    job = HydraConfig.get()
    is_sweep = job.mode == RunMode.MULTIRUN
    try:
        return tasks.start(
            tree,
            list(job.overrides.task),
            command=os.path.abspath(__file__),
            sweep=job.runtime.output_dir if is_sweep else None,
        )
    except (UserError, RanksFailed) as error:
        # A sweep goes on to its next job; a single run ends here, before Hydra adds lines of its own.
        if is_sweep:
            raise
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    end_with_launcher()
    config.register_schema()
    # Hydra then hands every error to us as it is, instead of ending the process in words of its own.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    except (UserError, RanksFailed) as error:
        sys.exit(f"error: {error}")
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {config.explain(error, sys.argv[1:])}")
