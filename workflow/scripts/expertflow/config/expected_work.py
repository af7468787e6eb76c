"""Estimate how much work a training is, in FLOPs, before it is planned.

From packed tokens where there are some, else from the bytes of the sources: a wide band then.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expertflow.config.specs import source_specs
from expertflow.core.errors import TrainingError
from expertflow.core.records import Record, read_part, read_record
from expertflow.data import cache
from expertflow.data.records import ExpertLock, SourceLock, SourceRecord
from expertflow.data.settings import SourceSpec
from expertflow.plan.flops import flops_per_token
from expertflow.plan.records import ModelFacts, PlanSpec
from expertflow.tokens.records import PackedSplit

# Bytes of a file for one token of the texts in it, least and most. Seen with Qwen's tokenizer on 21
# JSON Lines files of questions, code, chats, schemas and prose: as they are 2.7 to 11.7, with gzip
# 0.4 to 1.7, as Parquet 0.4 to 5.4. The bands leave out the ends; that is judgement.
PLAIN_BYTES = (2.5, 9.0)
COMPRESSED_BYTES = (0.4, 1.8)
PARQUET_BYTES = (0.5, 3.2)
# Before tokens exist nothing is known of documents either. The mean context that attention sees,
# the share of tokens that is learned, and how full rows get: judgement, generous on both sides.
MEAN_CONTEXT_TOKENS = (32.0, 1024.0)
SUPERVISED_FRACTION = (0.1, 1.0)
FILL_FRACTION = (0.7, 1.0)

Range = tuple[float, float]


class Unknown(Exception):
    """Nothing can be said; the message is the reason, in a few words."""


class Case(Record, frozen=True, kw_only=True):
    """An expert as it stands before its training.

    ``is_current`` tells of a rule and its record whether that was made with settings and code of
    now; for the rules of a source it needs the ``source``.
    """

    results: Path
    expert: dict[str, Any]
    spec: PlanSpec
    lock: ExpertLock
    is_current: Callable[..., bool]

    @property
    def sources(self) -> dict[str, SourceSpec]:
        """Give the sources by name."""
        return {source.name: source for source in source_specs(self.expert)}


def expected_flops(case: Case) -> tuple[Range, str]:
    """Give least and most FLOPs that the hardware executes, and what they were estimated from."""
    spec, packing, model = case.spec, case.results / "packing.json", case.results / "model.json"
    has_model = case.is_current("prepare_model", model)
    facts = read_part(ModelFacts, model, "facts") if has_model else _facts(case)
    if has_model and case.is_current("pack_sequences", packing):
        train: PackedSplit = read_part(PackedSplit, packing, "train")
        tokens = _trained_on(spec, train)
        context = (train.sum_len_sq / (2 * train.n_tokens),) * 2
        supervised = (train.n_target_tokens / train.n_tokens,) * 2
        basis = "estimate from packed tokens"
    else:
        tokens = _trained(spec, _tokens_from_bytes(case), _tokens_per_row(case))
        context, supervised = MEAN_CONTEXT_TOKENS, SUPERVISED_FRACTION
        basis = "estimate from bytes" + _limits(case)
    # The plan decides on ``auto``: layers that are computed again take their time.
    again = spec.gradient_checkpointing
    least, most = (
        flops_per_token(
            facts,
            lora=spec.lora,
            mean_context_tokens=context[i],
            supervised_fraction=supervised[i],
            checkpoint_activations=checkpoint,
        ).hardware
        for i, checkpoint in enumerate((bool(again), again is not False))
    )
    return (tokens[0] * least, tokens[1] * most), basis


def _trained_on(spec: PlanSpec, train: PackedSplit) -> Range:
    """Give the tokens of all steps over packed rows; the last step of an epoch may hold fewer."""
    per_epoch = (train.n_tokens,) * 2
    if spec.max_steps is None:
        return _trained(spec, per_epoch, None)
    steps = math.ceil(train.n_sequences / _rows_per_step(spec))
    return (train.n_tokens * spec.max_steps / steps,) * 2


def _rows_per_step(spec: PlanSpec) -> int:
    if spec.batch_size is None:
        raise Unknown("max_steps is set and batch_size is auto: the plan decides on tokens")
    return spec.batch_size * (spec.gradient_accumulation_steps or 1) * spec.world_size


def _trained(spec: PlanSpec, per_epoch: Range, per_row: Range | None) -> Range:
    """Give the tokens of all steps, from those of an epoch and of a row."""
    if spec.max_steps is not None:
        n_rows = _rows_per_step(spec)
        if per_row is None:
            raise Unknown("max_steps is set and the tokens of a row are not known before packing")
        # A step takes an epoch at most.
        low, high = (min(n_rows * per_row[i], per_epoch[i]) for i in (0, 1))
        return spec.max_steps * low, spec.max_steps * high
    return _epochs(spec, per_epoch[0]) * per_epoch[0], _epochs(spec, per_epoch[1]) * per_epoch[1]


def _epochs(spec: PlanSpec, tokens_per_epoch: float) -> float:
    if spec.target_tokens is None:
        return spec.num_train_epochs
    epochs = spec.target_tokens / tokens_per_epoch
    return min(max(epochs, spec.min_epochs or 0.0), spec.max_epochs or math.inf)


def _tokens_per_row(case: Case) -> Range | None:
    training = case.expert["training"]
    length = training["max_seq_length"]
    if length == "auto" or training["packing"] == "none":
        return None
    return length * FILL_FRACTION[0], length * FILL_FRACTION[1]


def _tokens_from_bytes(case: Case) -> Range:
    """Give least and most tokens of an epoch. Duplicates and rejects are not known yet."""
    least = most = 0.0
    sources = case.sources
    for lock in case.lock.sources:
        low, high = _tokens_of_source(case, sources[lock.name], lock)
        least += low * sources[lock.name].weight
        most += high * sources[lock.name].weight
    kept = 1 - case.expert["data"]["eval_fraction"]
    return least * kept, most * kept


def _tokens_of_source(case: Case, source: SourceSpec, lock: SourceLock) -> Range:
    is_made = lock.kind == "generated"
    kind, rule = ("generated", "generate_source") if is_made else ("fetched", "fetch_source")
    record = case.results / "sources" / kind / f"{lock.name}.json"
    if lock.files:
        sizes = [(f.n_bytes, _bytes_per_token(f.format, f.compression)) for f in lock.files]
    elif case.is_current(rule, record, source=lock.name):
        files = read_record(SourceRecord, record).files
        sizes = [(f.n_bytes, _bytes_per_token(f.format, f.compression)) for f in files]
    elif lock.kind == "hub" and (prepared := cache.find_source(source)) is not None:
        split = prepared.files(source.split or "train")
        sizes = [(path.stat().st_size, PLAIN_BYTES) for path in split]
    else:
        raise Unknown(f"source {lock.name} is not {kind} yet")
    return sum(n / most for n, (_, most) in sizes), sum(n / least for n, (least, _) in sizes)


def _bytes_per_token(file_format: str, compression: str | None) -> Range:
    if compression is not None:
        return COMPRESSED_BYTES
    return PARQUET_BYTES if file_format == "parquet" else PLAIN_BYTES


def _limits(case: Case) -> str:
    """Say that fewer documents may be kept than there are, which bytes do not tell."""
    data = case.expert["data"]
    is_limited = data["max_documents"] is not None or data["max_per_category"] is not None
    is_limited |= any(source.max_documents is not None for source in case.sources.values())
    return " before limits on documents" if is_limited else ""


def _facts(case: Case) -> ModelFacts:
    """Read the shape of a model that no record describes yet."""
    model: str = case.expert["model"]
    if model.startswith("builtin:"):
        shape = case.expert["builtin"]
        return ModelFacts(**shape, tie_word_embeddings=True, model_type="qwen3")
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _cached_model(model, case.expert["model_revision"])
    if not (folder / "config.json").is_file():
        raise Unknown(f"model {model} is neither a folder here nor downloaded")
    # Imported here: it brings tokenizers along, for a shape that is needed once.
    from expertflow.train.model.base import read_facts

    try:
        return read_facts(folder)
    except TrainingError as error:
        raise Unknown(f"model {model} has a config.json without a dense decoder's shape") from error


def _cached_model(model: str, revision: str | None) -> Path:
    """Give the place of a hub model's files, whether they are there or not."""
    folder = cache.hub_cache() / f"models--{model.replace('/', '--')}"
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or "main"
    return folder / "snapshots" / commit
