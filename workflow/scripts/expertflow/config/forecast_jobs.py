"""Model the seconds of jobs other than training that never ran here.

Each is its start plus its work over a speed, as a least and a most: judgments based on what was
seen on two shared cores. A data set's download is unknown, because its files are found later.
"""

from typing import Any

from expertflow.chain import STAGES
from expertflow.config import specs
from expertflow.config.forecast import Forecaster, Range, Unknown
from expertflow.config.hub_model import find_folder, look_up_downloads
from expertflow.core.errors import ExpertflowError
from expertflow.evaluate.records import HELD_OUT_LOSS
from expertflow.plan.flops import count_weights

# Seconds that a job takes to start, without torch and with it.
START_S, TORCH_START_S = (0.1, 2.0), (3.0, 30.0)
FIXED_S = {"find_datasets": START_S, "plan_training": (0.1, 30.0), "build_report": (1.0, 10.0)}
# Bytes per second, slowest and fastest, in one process that reads records.
READING = {
    "fetch_source": (3e8, 3e9),
    "generate_source": (2e6, 2e7),
    "prepare_shard": (2e6, 2e7),
    "pretokenize_shard": (3e6, 4e7),
    "deduplicate_documents": (1e7, 1e8),
    "pack_sequences": (1e7, 1e8),
}
# Bytes per second that a tokenizer learns from, and of weights: hashed, copied to a local disk,
# merged and written.
LEARNING, HASHING, COPYING, WRITING = (4e5, 4e6), (3e8, 3e9), (1e8, 3e9), (5e7, 1e9)
# Bytes per second from the hub: on an office line, and in a data center.
DOWNLOADING = (4e6, 4e8)
# Layers per second for the next token of all answers in a batch; the share of ``max_new_tokens``
# that the longest of them takes; answers scored per second.
LAYERS, ANSWER_FRACTION, SCORING = (500.0, 5000.0), (0.2, 1.0), (5.0, 1000.0)
# Packed rows store documents, targets and bounds besides ids.
ROW_BYTES_PER_RECORD_BYTE = (0.5, 4.0)


class JobForecaster(Forecaster):
    """Models jobs of one expert; ``wildcards`` distinguish those of a rule."""

    def forecast_job(self, rule: str, wildcards: Any) -> str | None:
        """Return ``0.3 to 4.5 s``; null if the rule is not modeled or its work is unknown.

        An unreadable record must not end a run.
        """
        try:
            (low, high), *parts = self._list_work(rule, wildcards)
        except (Unknown, ExpertflowError):
            return None
        for (least, most), (slowest, fastest) in parts:
            low, high = low + least / fastest, high + most / slowest
        return f"{low:.3g} to {high:.3g} s"

    def _list_work(self, rule: str, wildcards: Any) -> list[Any]:
        """Return the seconds of a job's start, and pairs of work and speed."""
        if rule in FIXED_S:
            return [FIXED_S[rule]]
        if rule in READING:
            return [START_S, (self._count_read(rule, wildcards), READING[rule])]
        if rule == "prepare_tokenizer":
            settings = self.expert.settings
            if settings["model"].startswith("builtin:") and settings["tokenizer"] is None:
                # It is learned from the documents.
                return [START_S, (self.count_bytes(), LEARNING)]
            return [START_S, (self._count_missing(weights=False), DOWNLOADING)]
        if rule == "evaluate_expert" and specs.evaluate_expert(self.expert, wildcards).judge:
            raise Unknown
        if rule in ("check_references", "evaluate_expert"):
            return [START_S, (self._count_questions(wildcards), SCORING)]
        n_weights = count_weights(self.current_facts())
        weights = 2.0 * n_weights, 4.0 * n_weights
        if rule == "prepare_model":
            missing = self._count_missing(weights=True)
            return [TORCH_START_S, (missing, DOWNLOADING), (weights, HASHING)]
        if rule == "stage_to_nvme":
            rows = _times(self.count_bytes(), ROW_BYTES_PER_RECORD_BYTE)
            return [START_S, (rows, COPYING), (weights, COPYING)]
        if rule == "generate_answers":
            # The base model and the trained one are loaded.
            loading = [(weights, HASHING)] * 2
            return [TORCH_START_S, *loading, (self._count_layers(wildcards), LAYERS)]
        if rule == "export_model":
            return [TORCH_START_S, (weights, WRITING)]
        raise Unknown

    def _count_read(self, rule: str, wildcards: Any) -> Range:
        source, stage = getattr(wildcards, "source", None), STAGES[rule]
        if source is None:
            return self.count_bytes()
        n_shards = self.expert.source_lock(source).n_shards if "{shard}" in stage.record else 1
        share = 1 / len(list(stage.shards(n_shards)))
        return _times(self.count_bytes(source), (share, share))

    def _count_missing(self, *, weights: bool) -> Range:
        """Return the bytes of a model's weights or other files to download; 0 if it is here."""
        settings = self.expert.settings
        name, revision = settings["model"], settings["model_revision"]
        if name.startswith("builtin:") or any(find_folder(name, revision).glob("*.safetensors")):
            return 0.0, 0.0
        if (missing := look_up_downloads(name, revision)) is None:
            raise Unknown
        n_bytes = sum(n for path, n in missing.items() if weights == path.endswith(".safetensors"))
        return n_bytes, n_bytes

    def _count_layers(self, wildcards: Any) -> Range:
        """Each batch of questions is answered token by token, each through all layers."""
        spec = specs.generate_answers(self.expert, wildcards)
        if spec.lm_eval is not None:
            raise Unknown
        n_batches = self._count_questions(wildcards)[0] / spec.batch_size
        n_most = n_batches * spec.max_new_tokens * self.current_facts().n_layers
        return _times((n_most, n_most), ANSWER_FRACTION)

    def _count_questions(self, wildcards: Any) -> Range:
        spec = specs.generate_answers(self.expert, wildcards)
        if spec.task == HELD_OUT_LOSS:
            return 0.0, 0.0
        n_candidates = self.expert.training.save_total_limit or 1
        n_choosing = spec.n_selection_examples * n_candidates
        # Twice: the base model is asked the same as the trained one.
        n_questions = 2.0 * spec.max_examples + n_choosing + spec.n_recall_examples
        return n_questions, n_questions


def _times(work: Range, factors: Range) -> Range:
    return work[0] * factors[0], work[1] * factors[1]
