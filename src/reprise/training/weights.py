"""Weights across runs: what a checkpoint must share with the model that loads it, and loading them."""

from pathlib import Path
from typing import Any

from reprise.data.tokenizer import Tokenizer
from reprise.models import LanguageModel, ModelConfig
from reprise.runtime import UserError, as_plain
from reprise.training.checkpoint import WAY_OUT, BrokenCheckpoint, load_checkpoint
from reprise.training.recovery_state import KEY, check_identity

# Settings of `model` that change no shape and no meaning of a weight.
_FREE = {"model.dropout", "model.embedding_dropout"} | {
    f"model.cell.{key}" for key in ("implementation", "context", "forget_bias", "residual_init", "norm_init")
}


def model_identity(config: ModelConfig) -> dict[str, Any]:
    """The settings by which two models have the same weights, each under its key in the config."""
    plain = as_plain(config)
    cell = plain.pop("cell")
    named = {f"model.{key}": value for key, value in plain.items()}
    named |= {f"model.cell.{key}": value for key, value in cell.items()}
    return {key: value for key, value in named.items() if key not in _FREE}


def identity(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a checkpoint and a run that loads it must share: the model, and what its tokens mean."""
    tokens = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.fingerprint}
    return model_identity(config) | tokens


def read_weights(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The model's state dict in a checkpoint.

    Args:
        path: the checkpoint.
        expected: what its identity must hold; `model_identity` before a corpus is read, `identity` after.

    Raises:
        UserError: the file is broken, or belongs to another model.
    """
    try:
        contents = load_checkpoint(path)
        saved = contents[KEY]["identity"]
    except (BrokenCheckpoint, KeyError, TypeError, OSError) as error:
        raise UserError(
            f"checkpoint.load={path}: not a whole checkpoint of this project ({error}); {WAY_OUT}"
        ) from error
    check_identity(saved, expected, where=f"checkpoint.load={path}")
    return {name.removeprefix("model."): value for name, value in contents["state_dict"].items()}


def load_weights(model: LanguageModel, path: Path, tokenizer: Tokenizer) -> None:
    """Fill a model from a checkpoint of the same model and tokenizer, or raise the UserError that says what differs."""
    model.load_state_dict(read_weights(path, identity(model.config, tokenizer)))
