"""The weights of a base model that a bundle names but does not hold."""

import logging
from pathlib import Path

from expertflow.core.errors import DataError, TrainingError
from expertflow.train.records import ModelRecord

log = logging.getLogger(__name__)


def link_weights(model: ModelRecord, given: Path | None, folder: Path) -> None:
    """Link a model's weights into ``folder``, from ``given``, the manifest's folder or the hub.

    Links that lead to the same weights stay.

    Raises:
        DataError: the weights found are another model's.
        TrainingError: there are none.
    """
    # Here, as it takes longer to import than most bundles take to open.
    from expertflow.train.model.base import hash_weights, weight_files

    there = weight_files(folder)
    if there and all(map(Path.is_file, there)) and hash_weights(folder) == model.weights_sha256:
        return
    source = given or _find_folder(model)
    files = weight_files(source)
    if not files:
        raise TrainingError(f"{source}: no *.safetensors; give the model's own folder as --model")
    log.info("hashing the weights of %s in %s", model.name, source)
    if (found := hash_weights(source)) != model.weights_sha256:
        raise DataError(
            f"{source}: its weights are not those of the bundle (weights_sha256 {found[:12]}… for"
            f" {model.weights_sha256[:12]}…); give the folder of {model.name}"
            f" {model.revision or ''} as --model"
        )
    for old in there:
        old.unlink()
    for file in files:
        (folder / file.name).symlink_to(file.resolve())


def _find_folder(model: ModelRecord) -> Path:
    if model.kind != "hub":
        folder = Path(model.name).expanduser()
        if not folder.is_dir():
            raise TrainingError(
                f"model {model.name}: no such folder on this machine; copy it here and give it as"
                " --model, or pack it with bundle_weights=true"
            )
        return folder
    from expertflow.train.model.base import download_model

    fix = "give a folder as --model, or pack it with bundle_weights=true"
    return download_model(model.name, model.revision, fix=fix)
