"""Check the weights to export, choose their dtype, and write the files next to them."""

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig

from expertflow.core.errors import ConfigError, TrainingError
from expertflow.core.settings import name_of
from expertflow.data.records import Layout
from expertflow.evaluate.generate import end_ids
from expertflow.evaluate.records import Decoding, Published
from expertflow.plan.settings import LoraSpec
from expertflow.tokens.records import TOKENIZER_FILES
from expertflow.train.model.base import LICENSE_FILES, weight_files
from expertflow.train.model.load import DTYPES
from expertflow.train.model.weights import weights_sha256

# Files that other loaders read, besides those that every tokenizer here has.
OLDER_FILES = (
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "spiece.model", "chat_template.json",
)  # fmt: skip
WHOLE = name_of(LoraSpec.modules_to_save)
SYSTEM_PROMPT = "system_prompt.txt"
STORED = {"F64": "fp32", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def check_weights(model: Any, published: Published, folder: Path) -> None:
    """Raise TrainingError unless a model has the weights that evaluation chose and scored."""
    adapter, trained = hasattr(model, "merge_and_unload"), (".lora_", f".{WHOLE}.")
    for name, parameter in model.named_parameters():
        # The hash covers trainable parameters, and loading froze them all.
        parameter.requires_grad_(not adapter or any(part in name for part in trained))
    found = weights_sha256(model)
    model.requires_grad_(False)
    if found != published.weights_sha256:
        raise TrainingError(
            f"{folder}: the weights have hash {found[:12]}, evaluation scored"
            f" {published.weights_sha256[:12]}; run train_expert again"
        )


def find_dtype(choice: Literal["auto", "fp32", "bf16"], base: Path) -> torch.dtype:
    """Return the dtype of the merged weights; ``auto`` is the base's most common one."""
    if choice != "auto":
        return DTYPES[choice]
    from safetensors import safe_open

    n_by_type: Counter[str] = Counter()
    for path in weight_files(base):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                n_by_type[tensor.get_dtype()] += int(torch.Size(tensor.get_shape()).numel())
    # Ties go to the first name, so that the order of files does not matter.
    stored = max(sorted(n_by_type), key=n_by_type.__getitem__, default="nothing")
    if stored not in STORED:
        raise TrainingError(
            f"export.dtype auto: the weights in {base} are {stored}; set export.dtype to fp32 or"
            " bf16"
        )
    return DTYPES[STORED[stored]]


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Cast parameters one by one, to avoid a second copy of the model."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def copy_texts(folder: Path, *, tokenizer: Path, layout: Layout) -> tuple[str, ...]:
    """Copy tokenizer, chat template and license; return the names of the license files."""
    names = (*TOKENIZER_FILES, *OLDER_FILES, *LICENSE_FILES)
    found = (path for name in names for path in tokenizer.glob(name))
    for path in filter(Path.is_file, found):
        target = folder / path.relative_to(tokenizer)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    if layout.chat_template is not None:
        # Training's template, possibly set by the manifest, overrides the tokenizer's.
        (folder / "chat_template.jinja").write_text(layout.chat_template, encoding="utf-8")
    texts = {path.name for pattern in LICENSE_FILES for path in folder.glob(pattern)}
    return tuple(sorted(texts))


def read_system_prompt(folder: Path) -> str | None:
    path = folder / SYSTEM_PROMPT
    try:
        return path.read_bytes().decode() if path.is_file() else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; export it again") from error


def set_decoding(model: Any, decoding: Decoding, *, end_id: int, text_end_id: int) -> None:
    """Write the decoding settings to the generation config; temperature 0 is greedy.

    They replace the base model's: sampling settings are invalid with greedy ones, and penalties
    would change the scored answers. The base's end tokens are kept. Stop texts apply only if
    ``generate`` gets the tokenizer.
    """
    own = model.generation_config
    ends = sorted(end_ids(own, end_id, text_end_id))
    names = ("temperature", "top_p", "top_k") if decoding.temperature > 0 else ()
    sampled: dict[str, object] = {name: getattr(decoding, name) for name in names}
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends,
        pad_token_id=text_end_id,
        do_sample=bool(sampled),
        stop_strings=list(decoding.stop) or None,
        **sampled,
    )
