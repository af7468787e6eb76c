"""How long every stage takes at a size, by what it shares its work among; pure arithmetic.

Times are those of the measured cores; one that is slower or quicker changes them all alike. Stages
come one after the other, as the chain runs them.
"""

from dataclasses import dataclass

from scale_figures import Line

from expertflow.data.buckets import PASS_ROWS
from expertflow.data.shards import token_shards
from expertflow.plan.cost import Work, prior_hours
from expertflow.plan.flops import flops_per_token, linear_weights
from expertflow.plan.records import ModelFacts

# What the workflow's settings allow and ask for; see workflow/schemas and workflow/rules.
MAX_SHARDS, TOKENISE_THREADS = 200, 4
# Documents and pieces are numbered in int32 (tokens/packing.py).
MAX_PIECES = 2**31 - 1
# Weights in fp32 and AdamW's two moments.
FULL_STATE_BYTES = 12
# Of full training's FLOPs, those of the forward pass: 2 of 6.
FORWARD = 1 / 3
Values = dict[str, float | None]
HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a stage takes. ``low_s`` and ``high_s`` are a band where there is one.

    ``memory_bytes`` is that of its largest process; null where it does not grow with the data, or
    is not known. ``reason`` says why there are no seconds.
    """

    stage: str
    scales: str
    seconds: float | None
    low_s: float | None = None
    high_s: float | None = None
    memory_bytes: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Memory and time of what one process does, over the number of documents.

    ``deduplicate_costs`` are seconds a document, and a document and pass over all keys. Null: not
    measured.
    """

    deduplicate_costs: tuple[float, float] | None
    deduplicate_bytes: Line | None
    pack_bytes: Line | None
    open_bytes: Line | None
    dry_run_s: Line | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much data on how many machines, and the model that is trained on it."""

    n_tokens: float
    n_nodes: int
    gpus_per_node: int
    facts: ModelFacts
    peak_flops_per_s: float | None

    @property
    def n_gpus(self) -> int:
        """Count the cards."""
        return self.n_nodes * self.gpus_per_node


def n_passes(n_documents: float) -> int:
    """Count how often deduplication goes over all keys: once for each million, in powers of two.

    >>> [n_passes(n) for n in (1_000_000, 3_000_000, 10_000_000, 3_000_000_000)]
    [1, 4, 16, 4096]
    """
    return 1 << (int(n_documents) // PASS_ROWS).bit_length()


def deduplicate_s(n_documents: float, costs: tuple[float, float]) -> float:
    """Give the seconds of deduplication: so much a document, and so much a document and pass."""
    return costs[0] * n_documents + costs[1] * n_documents * n_passes(n_documents)


def n_weights(facts: ModelFacts) -> int:
    """Count a model's weights, norms left out."""
    embeddings = facts.vocab_size * facts.hidden_size
    return linear_weights(facts) + embeddings * (1 if facts.tie_word_embeddings else 2)


def train_s(size: Size, v: Values, *, n_tokens: float | None = None) -> tuple[float, ...] | None:
    """Give low, middle and high seconds of training, by the plan's own band; null without a peak.

    Full training on rows of which every token is a target, no activations computed again.
    """
    n = size.n_tokens if n_tokens is None else n_tokens
    flops = flops_per_token(
        size.facts, lora=None, mean_context_tokens=v["mean_context_tokens"] or 0.0,
        supervised_fraction=1.0, checkpoint_activations=False,
    )  # fmt: skip
    batch = v["global_batch_tokens"] or 1.0
    n_steps = max(1, round(n / batch))
    work = Work(
        flops_model=flops.model * n, flops_hardware=flops.hardware * n, n_steps=n_steps,
        save_steps=n_steps, save_every_minutes=v["save_every_minutes"] or 10.0,
        eval_steps=n_steps, precision="bf16",
    )  # fmt: skip
    peak = None if size.peak_flops_per_s is None else size.peak_flops_per_s * size.n_gpus
    hours = prior_hours(work, peak)
    return None if hours is None else tuple(hour * HOUR for hour in hours)


def estimates(size: Size, v: Values, curves: Curves) -> list[Estimate]:
    """Give every stage of a chain, in its order."""
    return [
        *data_stages(size, v, curves),
        *plan_stages(size, v, curves),
        *run_stages(size, v, curves),
    ]


def data_stages(size: Size, v: Values, curves: Curves) -> list[Estimate]:
    """Give the stages that make rows."""
    n, cores = size.n_tokens, size.n_nodes * (v["cores_per_node"] or 1.0)
    n_sources = v["n_sources"] or 1.0
    n_prepare = min(cores, MAX_SHARDS * n_sources)
    n_tokenise = min(cores, len(token_shards(MAX_SHARDS)) * TOKENISE_THREADS * n_sources)
    n_documents = over(n, v["tokens_per_document"])
    costs = curves.deduplicate_costs
    known = n_documents is not None and costs is not None
    deduplicate = deduplicate_s(n_documents, costs) if known else None
    pack = over(times(n, v["pack_s_per_token"]), 1)
    if n_documents is not None and times(n, v["token_bytes_per_token"], none=0.0) > (
        v["node_memory_bytes"] or 0
    ):
        # Documents are read one by one, in the order of rows, and no longer from memory.
        pack = most(pack, over(n_documents, v["random_reads_per_s"]))
    return [
        one("lock, hash the sources", over(times(n, v["raw_bytes_per_token"]),
                                           v["hash_bytes_per_s"]), v, "hash_bytes_per_s"),
        estimate("fetch, count records", "one process a source",
                 over(times(n, v["fetch_s_per_token"]), n_sources), "fetch_s_per_token"),
        estimate("prepare", f"cores, at most {MAX_SHARDS} jobs a source: {n_prepare:.0f}",
                 over(times(n, v["prepare_s_per_token"]), n_prepare), "prepare_s_per_token"),
        one("deduplicate", deduplicate, v, "deduplicate",
            memory_at(curves.deduplicate_bytes, n_documents)),
        estimate("tokenise", f"cores, at most {n_tokenise:.0f} here",
                 over(times(n, v["tokenise_s_per_token"]), n_tokenise), "tokenise_s_per_token"),
        one("pack", pack, v, "pack_s_per_token", memory_at(curves.pack_bytes, n_documents)),
    ]  # fmt: skip


def plan_stages(size: Size, v: Values, curves: Curves) -> list[Estimate]:
    """Give what comes between rows and training."""
    n_shards = MAX_SHARDS * (v["n_sources"] or 1.0)
    dry = None if curves.dry_run_s is None else curves.dry_run_s.at(n_shards)
    row_bytes = times(size.n_tokens, v["row_bytes_per_token"])
    by_one = most(
        over(row_bytes, v["copy_bytes_per_s"]), over(row_bytes, v["disk_write_bytes_per_s"])
    )
    shared = over(times(row_bytes, size.n_nodes), v["shared_disk_bytes_per_s"])
    hashing = over(times(row_bytes, 2.0), v["hash_bytes_per_s"])
    return [
        one("plan: the DAG, once", dry, v, "dry_run"),
        estimate("stage rows to NVMe", "every node copies all rows",
                 most(by_one, shared), "copy_bytes_per_s"),
        one("hash rows, before and after", hashing, v, "hash_bytes_per_s"),
    ]  # fmt: skip


def run_stages(size: Size, v: Values, curves: Curves) -> list[Estimate]:
    """Give training and what follows; the band is the plan's."""
    train = train_s(size, v)
    held_out = size.n_tokens * (v["eval_fraction"] or 0.0)
    # Before the first step and at the end; the default is one epoch, and a check at its end.
    during = scaled(train_s(size, v, n_tokens=held_out), 2 * FORWARD)
    one_card = Size(n_tokens=held_out, n_nodes=1, gpus_per_node=1, facts=size.facts,
                    peak_flops_per_s=size.peak_flops_per_s)  # fmt: skip
    after = scaled(train_s(one_card, v), 2 * FORWARD)
    state = float(n_weights(size.facts) * FULL_STATE_BYTES)
    save = most(over(state, v["checkpoint_bytes_per_s"]), over(state, v["disk_write_bytes_per_s"]))
    n_saves = None
    if train is not None:
        n_saves = 1 + train[1] // ((v["save_every_minutes"] or 10.0) * 60)
    # What each training process holds of the rows besides their tokens.
    opened = memory_at(curves.open_bytes, over(size.n_tokens, v["tokens_per_document"]))
    report = times(size.n_tokens / (v["global_batch_tokens"] or 1.0), v["report_s_per_step"])
    return [
        banded("train", "all cards, shared perfectly", train, opened),
        one("checkpoints, in the background", times(save, n_saves), v, "checkpoint_bytes_per_s"),
        banded("held-out loss while training", "all cards", during),
        banded("evaluate: held-out loss, twice", "one card", after),
        one("report", report, v, "report_s_per_step"),
    ]


def one(
    stage: str, seconds: float | None, v: Values, needs: str, memory: float | None = None
) -> Estimate:
    """Give a stage of one process."""
    return estimate(stage, "one process", seconds, needs, memory)


def estimate(
    stage: str, scales: str, seconds: float | None, needs: str, memory: float | None = None
) -> Estimate:
    """Give a stage; without seconds the reason names the figure that is missing."""
    reason = None if seconds is not None else f"{needs} is not known, or what it is taken times"
    return Estimate(stage=stage, scales=scales, seconds=seconds, memory_bytes=memory, reason=reason)


def banded(
    stage: str, scales: str, band: tuple[float, ...] | None, memory: float | None = None
) -> Estimate:
    """Give a stage that follows the card's peak."""
    if band is None:
        return estimate(stage, scales, None, "the card's peak")
    low, middle, high = band
    return Estimate(
        stage=stage, scales=scales, seconds=middle, low_s=low, high_s=high, memory_bytes=memory
    )  # fmt: skip


def memory_at(line: Line | None, n_documents: float | None) -> float | None:
    """Give the memory of a process over so many documents."""
    return None if line is None or n_documents is None else line.at(n_documents)


def times(*values: float | None, none: float | None = None) -> float | None:
    """Multiply; ``none`` if a value is unknown."""
    product = 1.0
    for value in values:
        if value is None:
            return none
        product *= value
    return product


def over(value: float | None, by: float | None) -> float | None:
    """Divide; null if a value is unknown."""
    return None if value is None or not by else value / by


def most(*values: float | None) -> float | None:
    """Give the largest; null if one is unknown."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def scaled(band: tuple[float, ...] | None, by: float) -> tuple[float, ...] | None:
    """Scale a band."""
    return None if band is None else tuple(value * by for value in band)
