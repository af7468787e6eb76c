"""Forecast a training's hours and dollars before it runs, and the basis of the forecast.

A dry run shows it, so it is derived in milliseconds from the best basis on disk: the plan, else
packed tokens, else the bytes of the sources, both at the speed that ``plan/step_time.py`` predicts.
Each step down widens the band. Unknown values have a reason.
"""

import math
from pathlib import Path
from types import SimpleNamespace

from msgspec.structs import replace

from expertflow.config.expert import ConfiguredExpert
from expertflow.config.hub_model import find_folder, look_up_downloads
from expertflow.config.specs import code_of, spec_text
from expertflow.core.errors import (
    DataError,
    ExpertflowError,
    HardwareError,
    TrainingError,
    single_line,
)
from expertflow.core.files import sha256_file, sha256_text, sidecar_of
from expertflow.core.format import gib
from expertflow.core.records import Record, read_part, read_record
from expertflow.core.settings import name_of
from expertflow.core.sidecars import Sidecar
from expertflow.data.records import SourceLock, SourceRecord
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.registry import open_source
from expertflow.hardware import probe
from expertflow.hardware.records import GpuFacts
from expertflow.plan import memory, switches
from expertflow.plan.claims import time_words
from expertflow.plan.cost import price_of_plan
from expertflow.plan.flops import count_trained_weights, count_weights, flops_per_token
from expertflow.plan.records import USABLE_FRACTION, CostPlan, ModelFacts, PlanSpec, TrainPlan
from expertflow.plan.step_time import StepWork, bound_words, card_speed, predict_step
from expertflow.tokens.records import PackedSplit
from expertflow.train.optimizers import state_bytes
from expertflow.train.saved.checkpoint_files import newest_unfinished, step_of

# A file's bytes per token of its texts, least and most. Seen with Qwen's tokenizer on 21 JSON Lines
# files of questions, code, chats, schemas and prose: plain 2.7 to 11.7, with gzip 0.4 to 1.7, as
# Parquet 0.4 to 5.4. The bands leave out the extremes; that is a judgment call.
PLAIN_BYTES = (2.5, 9.0)
COMPRESSED_BYTES = (0.4, 1.8)
PARQUET_BYTES = (0.5, 3.2)
# Bytes of a generated record, least and most, before it is generated. The eight generators have 106
# to 1,529.
GENERATED_BYTES = (100.0, 1600.0)
# Before tokens exist, nothing is known about documents either. The mean context that attention
# sees, the share of tokens that is learned, and how full rows get: judgment, with wide margins.
MEAN_CONTEXT_TOKENS = (32.0, 1024.0)
SUPERVISED_FRACTION = (0.1, 1.0)
FILL_FRACTION = (0.7, 1.0)
# The share of matrix products' speed that training on a CPU reaches, by parameters: lowest and
# highest. Seen on two shared cores, with Qwen3's layers: 0.06 to 0.33 at half a million (the
# demos), 0.3 to 0.8 at a hundred million.
CPU_SHARE = {5e5: (0.05, 0.4), 1e8: (0.3, 0.8)}
# What it takes besides its steps, mostly to import torch.
CPU_START_S = (3.0, 20.0)

# Micro-batches of a step if the manifest leaves them to the plan: a guess of little weight.
N_MICRO_BATCHES = 4

Range = tuple[float, float]
# A training's tokens and one of its steps, at the least and at the most.
Runs = tuple[tuple[float, StepWork], tuple[float, StepWork]]


class Unknown(Exception):
    """No forecast is possible; the message is the reason, in a few words."""


class Forecast(Record, frozen=True, kw_only=True):
    """What a training should take, least and most; null if unknown. ``basis`` says why."""

    hours: Range | None = None
    usd: Range | None = None
    hardware: str
    basis: str

    def text(self) -> str:
        """Format it as the one line that Snakemake carries to its logger.

        >>> Forecast(hours=(0.5, 1.25), usd=None, hardware="L4", basis="plan").text()
        '0.50 to 1.2 hours; unknown dollars; L4; plan'
        """
        hours, usd = _text(self.hours), _text(self.usd)
        return f"{hours} hours; {usd} dollars; {self.hardware}; {self.basis}"

    def time_text(self) -> str:
        times = " to ".join(map(time_words, self.hours or ()))
        return f"{times or 'an unknown time'} ({self.basis.split('; ')[0]})"


class Forecaster:
    """Forecasts the training of an expert in its current state."""

    def __init__(self, expert: ConfiguredExpert) -> None:
        self.expert, self.spec, self.results = expert, expert.plan_spec, expert.results

    def forecast(self) -> Forecast:
        """Forecast the complete training; the basis mentions an unfinished one that is saved."""
        found = self._forecast()
        saved = newest_unfinished(Path("state", self.expert.name))
        note = "" if saved is None else f"; an unfinished one is saved at step {step_of(saved)}"
        return replace(found, basis=f"{found.basis}{note}")

    def _forecast(self) -> Forecast:
        # An unreadable record must not end a run.
        spec, plan, note, hardware = self.spec, self.results / "plan.json", "", self.spec.hardware
        try:
            if self._is_current("plan_training", plan):
                planned = _planned(plan)
                # A CPU plan has no speed, which would differ every time.
                if planned.hours is not None or planned.hardware != "cpu":
                    return planned
            # From other settings or code: not a basis, but say why it is not used.
            elif plan.is_file():
                note = "; plan.json is from other settings or code"
            gpu = probe.resolve_gpu(hardware, spec.gpu_table)
            hardware = "cpu" if gpu is None else f"{spec.world_size} x {gpu.name}"
            runs, basis = self._expected_runs(gpu)
            hours, words = (_cpu_hours(runs), "") if gpu is None else self._card_hours(runs, gpu)
        except Unknown as reason:
            return Forecast(hardware=hardware, basis=f"{reason}{note}")
        except ExpertflowError as error:
            return Forecast(hardware=spec.hardware, basis=single_line(str(error).split("; ")[0]))
        price = price_of_plan(spec, gpu)
        name = "cpu" if gpu is None else gpu.name
        return Forecast(
            hours=hours,
            usd=_range(price.usd(hours[0]), price.usd(hours[1])),
            hardware=hardware,
            basis=f"{basis}; {_price_text(price.usd_per_hour, price.as_of, name)}{words}{note}",
        )

    def check_memory(self) -> str | None:
        """Return a note if memory is tight; raise HardwareError if the card is too small.

        Counts only weights and states, which are certain. The plan's trace covers activations.
        """
        spec = self.spec
        try:
            gpu = probe.resolve_gpu(spec.hardware, spec.gpu_table)
            facts = self.current_facts()
        except Unknown:
            # The forecast, or the job that needs it, reports that.
            return None
        if gpu is None or (total := gpu.memory_total_bytes) is None:
            return None
        n_bytes, what = memory.standing_bytes(spec, facts)
        if n_bytes <= USABLE_FRACTION * total - memory.RESERVE_BYTES:
            return None
        sizes = f"{self.expert.name}: {what} take {gib(n_bytes)} and {gpu.name} has {gib(total)}"
        if n_bytes <= total:
            return f"{sizes}; whether activations fit is not known before the plan"
        raise HardwareError(f"{sizes}; {memory.suggest_smaller(spec, facts, gpu)}")

    def _is_current(self, rule: str, record: Path, **of: str) -> bool:
        """Return whether a record is complete and was made by the current rule, by its sidecar."""
        try:
            made, sha256 = read_record(Sidecar, sidecar_of(record)), sha256_file(record)
        except (DataError, FileNotFoundError):
            return False
        wildcards = SimpleNamespace(expert=self.expert.name, **of)
        spec, code = spec_text(rule, self.expert, wildcards), code_of(rule)
        return (made.spec_sha256, made.code, made.sha256) == (sha256_text(spec), code, sha256)

    def current_facts(self) -> ModelFacts:
        model = self.results / "model.json"
        if self._is_current("prepare_model", model):
            return read_part(ModelFacts, model, "facts")
        return self._facts()

    def _expected_runs(self, gpu: GpuFacts | None) -> tuple[Runs, str]:
        """Return the least and most tokens with a step of each, and the basis of the estimate."""
        spec, packing, facts = self.spec, self.results / "packing.json", self.current_facts()
        has_model = self._is_current("prepare_model", self.results / "model.json")
        row_tokens = self.expert.training.max_seq_length
        if has_model and self._is_current("pack_sequences", packing):
            train: PackedSplit = read_part(PackedSplit, packing, "train")
            row_tokens = read_part(int, packing, "sequence_length_tokens")
            per_epoch = (float(train.n_tokens),) * 2
            per_row: Range | None = (train.n_tokens / train.n_sequences,) * 2
            context = (train.mean_context_tokens,) * 2
            supervised = (train.n_target_tokens / train.n_tokens,) * 2
            basis = "estimate from packed tokens"
        else:
            # No rows yet, or a model whose shape is from other settings.
            per_epoch, per_row = self._tokens_from_bytes(), None
            if row_tokens is not None and self.expert.training.packing != "none":
                per_row = row_tokens * FILL_FRACTION[0], row_tokens * FILL_FRACTION[1]
            longest = row_tokens or math.inf
            # A document is at most as long as its row.
            low, high = MEAN_CONTEXT_TOKENS
            context = min(low, longest / 2), min(high, longest / 2)
            supervised = SUPERVISED_FRACTION
            basis = "estimate from bytes"
            data, sources = self.expert.settings["data"], self.expert.sources.values()
            limits = [data["max_documents"], data["max_per_category"]]
            if any(x is not None for x in (*limits, *(s.max_documents for s in sources))):
                basis += " before limits on documents"
        attention, training = switches.choose_attention(spec, gpu)[0], self.expert.training
        # What a plan would choose: enough rows to keep the card busy.
        per_micro_batch = memory.BUSY_TOKENS
        if spec.batch_size is not None and row_tokens is not None:
            per_micro_batch = spec.batch_size * row_tokens
        step = StepWork(
            facts=facts,
            lora=spec.lora,
            n_tokens=per_micro_batch,
            n_micro_batches=spec.gradient_accumulation_steps or N_MICRO_BATCHES,
            mean_context_tokens=context[0],
            supervised_fraction=supervised[0],
            # The plan resolves ``auto``; recomputing layers takes time.
            checkpoint=bool(spec.gradient_checkpointing),
            compiled=switches.choose_compile(
                spec, gpu, attention=attention, packing=training.packing
            )[0],
            is_quantized=spec.method == "qlora",
            n_trained=count_trained_weights(facts, spec.lora),
            value_bytes=int(memory.WEIGHT_BYTES[switches.choose_precision(spec, gpu)[0]]),
            weight_bytes=int(memory.WEIGHT_BYTES[spec.trained_dtype]),
            state_bytes=state_bytes(spec),
            n_shares=spec.n_shares,
        )
        most = step._replace(
            mean_context_tokens=context[1],
            supervised_fraction=supervised[1],
            checkpoint=spec.gradient_checkpointing is not False,
        )
        tokens = _count_trained(spec, per_epoch, per_row)
        return ((tokens[0], step), (tokens[1], most)), basis

    def _card_hours(self, runs: Runs, gpu: GpuFacts) -> tuple[Range, str]:
        speed = card_speed(
            gpu, switches.choose_precision(self.spec, gpu)[0], use_tf32=self.spec.use_tf32
        )
        if isinstance(speed, str):
            raise Unknown(speed)
        hours = []
        # The least work at the fast end of the band, the most at the slow one.
        for (n_tokens, work), error in zip(runs, speed.band, strict=True):
            step = predict_step(work, speed)
            n_tokens_a_step = work.n_tokens * work.n_micro_batches * self.spec.world_size
            hours.append(math.ceil(n_tokens / n_tokens_a_step) * step.total_s * error / 3600)
        return (hours[0], hours[1]), f"; {bound_words(step)}"

    def _tokens_from_bytes(self) -> Range:
        """Return least and most tokens of an epoch; duplicates and rejects are not known yet."""
        least = most = 0.0
        for lock in self.expert.lock.sources:
            source = self.expert.sources[lock.name]
            for n_bytes, (low, high) in self._files_of(source, lock):
                # Fewest tokens: fewest bytes, and most bytes per token.
                least += n_bytes[0] / high * source.weight
                most += n_bytes[1] / low * source.weight
        kept = 1 - self.expert.settings["data"]["eval_fraction"]
        # Held-out documents have tokens, but are not trained on.
        return least * kept, most * kept

    def count_bytes(self, *names: str) -> Range:
        """Return the least and most bytes of some sources, or of all."""
        locks = [one for one in self.expert.lock.sources if not names or one.name in names]
        files = [f for one in locks for f in self._files_of(self.expert.sources[one.name], one)]
        return sum(low for (low, _), _ in files), sum(high for (_, high), _ in files)

    def _files_of(self, source: SourceSpec, lock: SourceLock) -> list[tuple[Range, Range]]:
        """List the least and most bytes of a source's files, and of a token in each."""
        is_made = lock.kind == "generated"
        kind, rule = ("generated", "generate_source") if is_made else ("fetched", "fetch_source")
        record = self.results / "sources" / kind / f"{lock.name}.json"
        if lock.files or self._is_current(rule, record, source=lock.name):
            files = lock.files or read_record(SourceRecord, record).files
            return [((f.n_bytes,) * 2, _bytes_per_token(f.format, f.compression)) for f in files]
        found = open_source(source).look_up()
        if found.status == "prepared":
            return [((found.n_bytes or 0,) * 2, PLAIN_BYTES)]
        if is_made and found.n_records is not None:
            low, high = GENERATED_BYTES
            return [((found.n_records * low, found.n_records * high), PLAIN_BYTES)]
        raise Unknown(f"source {lock.name} is not {kind} yet")

    def _facts(self) -> ModelFacts:
        settings = self.expert.settings
        model: str = settings["model"]
        if model.startswith("builtin:"):
            shape = settings["builtin"]
            return ModelFacts(**shape, tie_word_embeddings=True, model_type="qwen3")
        # From config.json alone; weights may still have to be downloaded.
        revision: str | None = settings["model_revision"]
        folder = find_folder(model, revision)
        if not (folder / "config.json").is_file():
            look_up_downloads(model, revision)
            folder = find_folder(model, revision)
        if not (folder / "config.json").is_file():
            problem = "neither a local folder, nor downloaded, nor available from the hub"
            raise Unknown(f"model {model} is {problem}")
        # Imported here: it loads tokenizers, for a shape that is needed once.
        from expertflow.train.model.base import read_facts

        try:
            return read_facts(folder)
        except TrainingError as error:
            problem = f"model {model} has a config.json without a dense decoder's shape"
            raise Unknown(problem) from error


def _cpu_hours(runs: Runs) -> Range:
    low, high = _cpu_share(count_weights(runs[0][1].facts))
    least, most = (
        n_tokens
        * flops_per_token(
            work.facts,
            lora=work.lora,
            mean_context_tokens=work.mean_context_tokens,
            supervised_fraction=work.supervised_fraction,
            checkpoint_activations=work.checkpoint,
        ).hardware
        for n_tokens, work in runs
    )
    speed, (soonest_s, latest_s) = probe.cpu_flops_per_s(), CPU_START_S
    return (least / speed / high + soonest_s) / 3600, (most / speed / low + latest_s) / 3600


def _cpu_share(n_weights: int) -> Range:
    """Interpolate between the two measured sizes, by the logarithm of the size.

    >>> _cpu_share(1000), _cpu_share(10**9)
    ((0.05, 0.4), (0.3, 0.8))
    """
    (small, of_small), (large, of_large) = CPU_SHARE.items()
    place = min(1.0, max(0.0, math.log(n_weights / small) / math.log(large / small)))
    low, high = (a + place * (b - a) for a, b in zip(of_small, of_large, strict=True))
    return low, high


def _planned(path: Path) -> Forecast:
    cost: CostPlan = read_part(CostPlan, path, "cost")
    name: str = read_part(str, path, "hardware")
    basis = "calibrated plan" if cost.calibrated else "plan"
    words = "" if cost.step is None else f"; {bound_words(cost.step)}"
    hours = _range(cost.predicted_hours_low, cost.predicted_hours_high)
    if hours is None:
        return Forecast(hardware=name, basis=f"{basis}: {cost.reason}")
    n_cards = read_part(int, path, name_of(TrainPlan.world_size))
    return Forecast(
        hours=hours,
        usd=_range(cost.predicted_usd_low, cost.predicted_usd_high),
        hardware=name if name == "cpu" else f"{n_cards} x {name}",
        basis=f"{basis}; {_price_text(cost.price_usd_per_hour, cost.price_as_of, name)}{words}",
    )


def _price_text(usd_per_hour: float | None, as_of: str | None, gpu: str) -> str:
    if usd_per_hour is None:
        is_card = gpu != "cpu"
        return f"no price for {gpu} in config/hardware/prices.yaml" if is_card else "no price set"
    return f"${usd_per_hour:.2f}/h" + (f" of {as_of}" if as_of else ", undated")


def _range(low: float | None, high: float | None) -> Range | None:
    return None if low is None or high is None else (low, high)


def _text(values: Range | None) -> str:
    return "unknown" if values is None else f"{_number(values[0])} to {_number(values[1])}"


def _number(value: float) -> str:
    # Two digits: 0.034, 0.50, 1.2, 12, 340
    n_decimals = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{n_decimals}f}"


def _count_trained(spec: PlanSpec, per_epoch: Range, per_row: Range | None) -> Range:
    if spec.max_steps is None:
        low, high = (switches.count_epochs(spec, n_tokens) * n_tokens for n_tokens in per_epoch)
        return low, high
    if spec.batch_size is None:
        raise Unknown("max_steps is set and batch_size is auto, so the plan decides on tokens")
    if per_row is None:
        raise Unknown("max_steps is set and the tokens per row are not known before packing")
    n_rows = spec.batch_size * (spec.gradient_accumulation_steps or 1) * spec.world_size
    # A step takes at most an epoch.
    low, high = (min(n_rows * row, all_) for row, all_ in zip(per_row, per_epoch, strict=True))
    return spec.max_steps * low, spec.max_steps * high


def _bytes_per_token(file_format: str, compression: str | None) -> Range:
    if compression is not None:
        return COMPRESSED_BYTES
    return PARQUET_BYTES if file_format == "parquet" else PLAIN_BYTES
