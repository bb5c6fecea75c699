"""Checkpoint files: complete, atomic, verified by digest, never trusted with code.

A checkpoint's name holds its step and the digest of its bytes, `step_00001200-3f2a....ckpt`, so one rename publishes
both and a torn or tampered file is told from a whole one by reading it.
"""

import errno
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from reprise.runtime import UserError, say, sync_folder

_NAME = re.compile(r"step_(\d{8})-([0-9a-f]{16})\.ckpt")
_CHUNK_BYTES = 1 << 22
# What to do where `checkpoint.load` names nothing that can be loaded.
WAY_OUT = "give a run folder like runs/<name>/<digest>"


@dataclass
class CheckpointConfig:
    """What is saved, when, and what a run starts from."""

    load: Optional[str] = None
    every_steps: Optional[int] = None
    every_minutes: Optional[float] = 1.0
    keep_latest: int = 2

    def __post_init__(self) -> None:
        for key in ("every_steps", "every_minutes", "keep_latest"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise UserError(f"checkpoint.{key}={value}: more than 0")


@dataclass(frozen=True)
class CheckpointFile:
    """One file under `checkpoints/`, ordered by step."""

    step: int
    digest: str
    path: Path

    def is_whole(self) -> bool:
        """Whether the bytes still are those that were saved."""
        return _digest_of_file(self.path) == self.digest


class BrokenCheckpoint(Exception):
    """The file's bytes are not those that were saved."""


def list_checkpoints(folder: Path) -> list[CheckpointFile]:
    """The checkpoints of a run, newest first. Unfinished writes are no checkpoints."""
    found = []
    for path in folder.glob("step_*.ckpt"):
        if match := _NAME.fullmatch(path.name):
            found.append(CheckpointFile(int(match[1]), match[2], path))
    return sorted(found, key=lambda file: file.step, reverse=True)


def save_checkpoint(contents: dict[str, Any], folder: Path, *, step: int, keep_latest: int) -> Path:
    """Write beside the target, fsync, rename; then delete all but the `keep_latest` newest up to this step.

    Raises:
        OSError: the disk is full or not writable; the checkpoints that were there are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".writing-*"):
        leftover.unlink()
    temporary = folder / f".writing-{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"step_{step:08d}-{_digest_of_file(temporary)}.ckpt"
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        free_mib = shutil.disk_usage(folder).free / 2**20
        # A full disk comes out of torch's zip writer as a RuntimeError about a position.
        number = error.errno if isinstance(error, OSError) else errno.EIO
        reason = str(error).splitlines()[0]
        raise OSError(
            number, f"checkpoint of step {step} not saved, {free_mib:.0f} MiB free: {reason}", str(folder)
        ) from error
    sync_folder(folder)
    # A file of this step or a later one was found broken, or the run would not be here: it goes first.
    others = [other for other in list_checkpoints(folder) if other.path != path]
    earlier = [other for other in others if other.step < step]
    for other in others:
        if other not in earlier[: keep_latest - 1]:
            other.path.unlink(missing_ok=True)
    return path


def newest_whole_checkpoint(folder: Path) -> CheckpointFile | None:
    """The newest checkpoint whose digest holds; each broken one is named in one line and passed over."""
    for file in list_checkpoints(folder):
        if file.is_whole():
            return file
        say(f"checkpoint {file.path.name} is broken (digest differs); falling back to the one before")
    return None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint on the CPU, plain data and tensors only.

    Raises:
        BrokenCheckpoint: the digest in the name is not that of the bytes, or they are no checkpoint.
    """
    match = _NAME.fullmatch(path.name)
    if match and _digest_of_file(path) != match[2]:
        raise BrokenCheckpoint(f"{path}: the bytes are not those that were saved")
    try:
        contents: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # Of a file that is no checkpoint torch's reader may raise anything, and recommends to run the file's code.
        raise BrokenCheckpoint("no checkpoint, or one that holds more than plain data and tensors") from error
    return contents


def find_checkpoint(where: str) -> Path:
    """The file that `checkpoint.load=<where>` means: a checkpoint, or the newest whole one of a run folder.

    Raises:
        UserError: nothing there, or nothing whole there.
    """
    path = Path(where).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"checkpoint.load={where}: no such run folder or checkpoint file; {WAY_OUT}")
    newest = newest_whole_checkpoint(path / "checkpoints")
    if newest is None:
        raise UserError(f"checkpoint.load={where}: no whole checkpoint under {path / 'checkpoints'}; {WAY_OUT}")
    return newest.path


def run_of_checkpoint(path: Path) -> Path:
    """The run folder a checkpoint file belongs to."""
    return path.resolve().parent.parent


def weights_sha256(model: torch.nn.Module) -> str:
    """Digest of every parameter's bytes, in name order; a tied parameter counts once."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().to("cpu").contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:16]
