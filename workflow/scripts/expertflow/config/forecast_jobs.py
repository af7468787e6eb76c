"""Model the seconds of jobs other than training if none of their kind ran here.

Each is its start plus its work over a speed, as a least and a most: judgments based on what was
seen on two shared cores. A data set's download is unknown, because its files are found later.
"""

from collections.abc import Callable
from typing import Any

from expertflow.config import specs
from expertflow.config.cpu_forecast import Range
from expertflow.config.forecast import Forecaster, Unknown
from expertflow.config.hub_model import find_folder, look_up_downloads
from expertflow.core.errors import ExpertflowError
from expertflow.data.shards import token_shards
from expertflow.evaluate.records import HELD_OUT_LOSS
from expertflow.plan.flops import count_weights

# Seconds that a job takes to start, without torch and with it.
START_S, TORCH_START_S = (0.1, 2.0), (3.0, 30.0)
# Bytes of records per second in one process, slowest and fastest.
RENDERING, TOKENIZING, MERGING, LEARNING = (2e6, 2e7), (3e6, 4e7), (1e7, 1e8), (4e5, 4e6)
# Bytes per second when copying to a local disk, hashing files, and merging and writing weights.
COPYING, HASHING, WRITING = (1e8, 3e9), (3e8, 3e9), (5e7, 1e9)
# Bytes per second from the hub: on an office line, and in a data center.
DOWNLOADING = (4e6, 4e8)
# Seconds per layer for the next token of all answers in a batch; the share of ``max_new_tokens``
# that the longest of them takes; seconds to score an answer.
LAYER_S, ANSWER_FRACTION, SCORING_S = (2e-4, 2e-3), (0.2, 1.0), (1e-3, 0.2)
# Packed rows store documents, targets and bounds besides ids.
ROW_BYTES_PER_RECORD_BYTE = (0.5, 4.0)


class JobForecaster(Forecaster):
    """Models jobs of one expert; ``wildcards`` distinguish those of a rule."""

    def forecast_job(self, rule: str, wildcards: Any) -> str | None:
        """Return ``0.3 to 4.5 s``; null if the rule is not modeled or its work is unknown.

        An unreadable record must not end a run.
        """
        model: Callable[[Any], Range] | None = getattr(self, rule, None)
        try:
            seconds = None if model is None else model(wildcards)
        except (Unknown, ExpertflowError):
            return None
        return seconds and f"{seconds[0]:.3g} to {seconds[1]:.3g} s"

    def find_datasets(self, _: Any) -> Range:
        return START_S

    def fetch_source(self, wildcards: Any) -> Range:
        return self._reading(HASHING, wildcards.source)

    def generate_source(self, wildcards: Any) -> Range:
        return self._reading(RENDERING, wildcards.source)

    def prepare_shard(self, wildcards: Any) -> Range:
        n_shards = self.expert.source_lock(wildcards.source).n_shards
        return self._reading(RENDERING, wildcards.source, n_parts=n_shards)

    def pretokenize_shard(self, wildcards: Any) -> Range:
        n_shards = len(token_shards(self.expert.source_lock(wildcards.source).n_shards))
        return self._reading(TOKENIZING, wildcards.source, n_parts=n_shards)

    def deduplicate_documents(self, _: Any) -> Range:
        return self._reading(MERGING)

    pack_sequences = deduplicate_documents

    def prepare_tokenizer(self, _: Any) -> Range:
        settings = self.expert.settings
        if settings["model"].startswith("builtin:") and settings["tokenizer"] is None:
            # It is learned from the documents.
            return self._reading(LEARNING)
        return _add(START_S, self._downloading(weights=False))

    def prepare_model(self, _: Any) -> Range:
        hashing = _over(self._weight_bytes(), HASHING)
        return _add(TORCH_START_S, _add(self._downloading(weights=True), hashing))

    def plan_training(self, _: Any) -> Range:
        return START_S[0], TORCH_START_S[1]

    def stage_to_nvme(self, _: Any) -> Range:
        rows = _times(self.count_bytes(), ROW_BYTES_PER_RECORD_BYTE)
        return _add(START_S, _over(_add(rows, self._weight_bytes()), COPYING))

    def generate_answers(self, wildcards: Any) -> Range:
        """Each batch of questions is answered token by token, by two models or more."""
        spec = specs.generate_answers(self.expert, wildcards)
        if spec.lm_eval is not None:
            raise Unknown
        n_batches = self._count_questions(wildcards) / spec.batch_size
        n_steps = _times((n_batches, n_batches), ANSWER_FRACTION, spec.max_new_tokens)
        n_layers = self.current_facts().n_layers
        answering = _times(n_steps, LAYER_S, n_layers)
        # The base model, and the trained one.
        loading = _over(_times(self._weight_bytes(), (2, 2)), HASHING)
        return _add(TORCH_START_S, _add(loading, answering))

    def evaluate_expert(self, wildcards: Any) -> Range:
        if specs.evaluate_expert(self.expert, wildcards).judge is not None:
            raise Unknown
        n_questions = self._count_questions(wildcards)
        return _add(START_S, _times((n_questions, n_questions), SCORING_S))

    def export_model(self, _: Any) -> Range:
        return _add(TORCH_START_S, _over(self._weight_bytes(), WRITING))

    def build_report(self, _: Any) -> Range:
        return 1.0, 10.0

    def _reading(self, speed: Range, *sources: str, n_parts: int = 1) -> Range:
        return _add(START_S, _over(self.count_bytes(*sources), speed, n_parts))

    def _count_questions(self, wildcards: Any) -> int:
        spec = specs.generate_answers(self.expert, wildcards)
        if spec.task == HELD_OUT_LOSS:
            return 0
        n_candidates = self.expert.training.save_total_limit or 1
        n_choosing = spec.n_selection_examples * n_candidates
        # Twice: the base model is asked the same as the trained one.
        return 2 * spec.max_examples + n_choosing + spec.n_recall_examples

    def _downloading(self, *, weights: bool) -> Range:
        """Return the seconds to download a model's weights or other files; 0 if it is here."""
        settings = self.expert.settings
        name, revision = settings["model"], settings["model_revision"]
        if name.startswith("builtin:") or any(find_folder(name, revision).glob("*.safetensors")):
            return 0.0, 0.0
        if (missing := look_up_downloads(name, revision)) is None:
            raise Unknown
        n_bytes = sum(n for path, n in missing.items() if weights == path.endswith(".safetensors"))
        return _over((n_bytes, n_bytes), DOWNLOADING)

    def _weight_bytes(self) -> Range:
        n_weights = count_weights(self.current_facts())
        return 2.0 * n_weights, 4.0 * n_weights


def _add(first: Range, second: Range) -> Range:
    return first[0] + second[0], first[1] + second[1]


def _times(first: Range, second: Range, factor: float = 1) -> Range:
    return first[0] * second[0] * factor, first[1] * second[1] * factor


def _over(work: Range, speed: Range, n_parts: int = 1) -> Range:
    return work[0] / speed[1] / n_parts, work[1] / speed[0] / n_parts
