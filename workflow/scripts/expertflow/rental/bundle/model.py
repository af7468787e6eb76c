"""A base model that is not made on the spot: what a bundle holds of it, and where the rest is."""

import logging
from pathlib import Path

from expertflow.core.errors import DataError, TrainingError
from expertflow.rental.bundle.records import MODEL, ModelToFetch
from expertflow.rental.bundle.tar import Item
from expertflow.train.model.base import WANTED_FILES, hash_weights, wanted_files, weight_files
from expertflow.train.records import ModelRecord

log = logging.getLogger(__name__)


def model_place(expert: str) -> str:
    """Give the folder of a model that came with a bundle, in whatever working directory."""
    return f"results/{expert}/{MODEL}"


def model_items(expert: str, model: ModelRecord, *, with_weights: bool) -> dict[str, Item]:
    """List what is packed of a hub or local model: tokenizer and settings, weights if asked for."""
    folder = Path(model.path)
    weights = set(weight_files(folder))
    if not weights:
        raise DataError(f"{folder}: the base model is gone; delete model.json and run again")
    return {
        f"{model_place(expert)}/{path.name}": Item(content=path)
        for path in wanted_files(folder)
        if with_weights or path not in weights
    }


def find_weights(model: ModelToFetch, given: Path | None) -> list[Path]:
    """Find a model's weights on this box, or download them, and check their hash.

    Raises:
        DataError: what is there is another model.
        TrainingError: it is nowhere to be had.
    """
    folder = given or _look_up(model)
    files = weight_files(folder)
    if not files:
        raise TrainingError(f"{folder}: no *.safetensors; give the model's own folder as --model")
    log.info("hashing the weights of %s in %s", model.name, folder)
    if (found := hash_weights(folder)) != model.weights_sha256:
        raise DataError(
            f"{folder}: its weights are not those of the bundle (weights_sha256 {found[:12]}… for"
            f" {model.weights_sha256[:12]}…); give the folder of {model.name}"
            f" {model.revision or ''} as --model"
        )
    return files


def lay_out_weights(files: list[Path], folder: Path) -> None:
    """Put weights beside tokenizer and settings, as links: they stay where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in weight_files(folder):
        old.unlink()
    for file in files:
        (folder / file.name).symlink_to(file.resolve())


def has_weights(folder: Path, model: ModelToFetch) -> bool:
    """Tell whether the weights that were linked are still there, and the same."""
    files = weight_files(folder)
    return all(file.is_file() for file in files) and hash_weights(folder) == model.weights_sha256


def _look_up(model: ModelToFetch) -> Path:
    if model.kind == "local":
        folder = Path(model.name).expanduser()
        if not folder.is_dir():
            raise TrainingError(
                f"model {model.name}: no such folder on this box; copy it here and give it as"
                " --model, or pack it with bundle_weights=true"
            )
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.name, revision=model.revision, allow_patterns=list(WANTED_FILES)
            )
        )
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise TrainingError(
            f"model {model.name}: neither in this box's cache nor to be had from the hub"
            f" ({type(error).__name__}); give a folder as --model, or pack it with"
            " bundle_weights=true"
        ) from error
