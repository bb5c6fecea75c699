"""Entry point: `python run.py task=<task> key=value ...`; README.md shows the commands."""

import errno
import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from reprise import config, jobs
from reprise.runtime import LAUNCHED, RanksFailed, UserError, end_with_launcher, report_failure

# What a full or closed disk says (EIO where torch's writer hides it); the user can mend it, a traceback would not help.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)

is_composed = False


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(tree: DictConfig) -> float | None:
    global is_composed
    is_composed = True
    job = HydraConfig.get()
    is_sweep = job.mode == RunMode.MULTIRUN
    try:
        return jobs.start(
            tree,
            list(job.overrides.task),
            command=str(Path(__file__).resolve()),
            sweep=job.runtime.output_dir if is_sweep else None,
        )
    except Exception as error:
        report_failure(error)
        # A sweep goes on to its next job; a single run ends here, before Hydra adds lines of its own.
        if not is_sweep and is_for_the_user(error):
            # Whoever launched this rank says what it reported.
            sys.exit(1 if LAUNCHED in os.environ else f"error: {error}")
        raise


def is_for_the_user(error: Exception) -> bool:
    """Whether one line says it all; anything else is our own fault and keeps its traceback."""
    return isinstance(error, UserError | RanksFailed) or (isinstance(error, OSError) and error.errno in DISK_ERRORS)


if __name__ == "__main__":
    end_with_launcher()
    config.register_schema()
    # Hydra then hands every error to us as it is, instead of ending the process in words of its own.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {config.explain(error, sys.argv[1:])}")
    except Exception as error:
        # Hydra composes before it calls `main`, and has a plain ValueError for an override like `optim=null`.
        if is_for_the_user(error) or not is_composed:
            sys.exit(f"error: {error}")
        raise
