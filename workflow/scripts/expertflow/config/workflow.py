"""The bridge to Snakemake: the source of the rules' inputs, resources, settings and code.

Its methods are Snakemake's input functions themselves. Experts are loaded, checked and locked when
Snakemake first asks for one of their files, so a fault in one manifest does not stop the others. A
user's mistake is reported in one line.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, TypeVar

from snakemake.io import ancient, directory  # type: ignore[import-untyped]

from expertflow.chain import CHAIN, STAGES, expand_path
from expertflow.config import machine
from expertflow.config.ablations import variant_spec
from expertflow.config.code_digest import parsed_modules
from expertflow.config.expert import ConfiguredExpert, RunContext
from expertflow.config.forecast import Forecaster
from expertflow.config.forecast_jobs import JobForecaster
from expertflow.config.guard import note, one_line
from expertflow.config.load import find_manifest, load_config
from expertflow.config.specs import code_of, spec_text
from expertflow.config.validate import FOLDERS
from expertflow.core.attempts import ATTEMPT, CARDS, LOG
from expertflow.core.errors import ConfigError
from expertflow.core.hashes import HashCache
from expertflow.data.shards import token_shards
from expertflow.hardware.probe import no_gpu_reason
from expertflow.rental.bundle.records import OPENED

C = TypeVar("C", bound=type)
InputFunction = Callable[..., Any]
# Prefix of inputs that are not flags of the rule's script.
NEEDED = "needs_"
NOT_READ = "not-read"
# An expert's files by name, as rules request them; a record precedes a page of the same name.
FILES = {
    PurePath(path).stem + "/" * path.endswith("/"): f"{stage.folder}/{path}"
    for stage in CHAIN
    for path in (*stage.files.values(), stage.record)
    if "{" not in path
}


def in_one_line(cls: C) -> C:
    """Make every method end Snakemake with one line for a user's error."""
    for name, method in list(vars(cls).items()):
        if callable(method):
            setattr(cls, name, one_line(method))
    return cls


@in_one_line
class Workflow:
    """The configured workflow.

    ``shows_forecast`` says whether a dry run shows one of a rule, ``reads_code`` whether code
    matters to this run. ``on_first_use`` is called when Snakemake first asks for anything of an
    expert, ``on_lock`` for each lock.
    """

    def __init__(
        self,
        run: RunContext,
        *,
        shows_forecast: Callable[[str], bool] = lambda rule: True,
        reads_code: Callable[[], bool] = lambda: True,
        on_first_use: Callable[[], None] | None = None,
        on_lock: Callable[[str], None] = lambda path: None,
    ) -> None:
        self._run, self._shows_forecast, self._reads_code = run, shows_forecast, reads_code
        self._on_first_use, self._on_lock = on_first_use, on_lock
        self._config, self._hashes = load_config(run.config, run.told), HashCache()
        for name in map(str, run.told.get("experts", {})):
            # Overrides of a misspelled expert would have no effect. A bundle has its own manifest.
            if not Path("results", name, OPENED).is_file():
                find_manifest(name, [folder / "experts" for folder in FOLDERS])
        self.experts: list[str] = list(self._config["experts"])
        # Snakemake asks for the same expert hundreds of times.
        self._loaded: dict[str, ConfiguredExpert] = {}
        parsed_modules.keep_in(Path("state/code.json"))

    def _expert(self, wildcards: Any) -> ConfiguredExpert:
        name = wildcards.expert
        if self._on_first_use is not None:
            self._on_first_use()
            self._on_first_use = None
        if name not in self._loaded:
            self._loaded[name] = ConfiguredExpert(name, self._run, self._config, self._hashes)
        return self._loaded[name]

    def files(self, names: str) -> dict[str, str]:
        """Return an expert's files as inputs by their stems or, from ``flag=stem``, by flags.

        Those in parentheses must exist, and the script finds them by itself. The name of a folder
        ends with a slash; its record shows whether it changed.
        """
        found = {}
        for word in names.split():
            flag, _, name = word.strip("()").partition("=")
            path = FILES[name or flag]
            # An input's name must be an identifier: packed/ -> needs_packed_files.
            key = f"{NEEDED}{flag.replace('/', '_files')}" if word[0] == "(" else flag.rstrip("/")
            found[key] = ancient(path[:-1]) if path.endswith("/") else path
        return found

    def shards(
        self, records: InputFunction, *suffixes: str, needed: bool = False
    ) -> dict[str, object]:
        """Return records of shards as inputs, and the files next to them."""

        def files(wildcards: Any) -> list[str]:
            stems = [record.removesuffix(".json") for record in records(wildcards)]
            # documents/a/000.json -> documents/a/000.arrow
            return [stem + suffix for stem in stems for suffix in suffixes]

        stem = NEEDED if needed else ""
        return {f"{stem}shards": records, f"{NEEDED}files": ancient(files)}

    def outputs(self, stage: str, **flags: Callable[[str], str]) -> dict[str, str]:
        """Return a stage's outputs by their declared names."""
        made = {"record": STAGES[stage].record, **STAGES[stage].files}
        paths = {name: f"{STAGES[stage].folder}/{path}" for name, path in made.items()}
        found = {n: directory(p[:-1]) if p.endswith("/") else p for n, p in paths.items()}
        return {**found, **{name: flag(found[name]) for name, flag in flags.items()}}

    def log(self, stage: str) -> str:
        return f"{STAGES[stage].folder}/{STAGES[stage].log}"

    def params(self, stage: str, flags: str = "") -> dict[str, InputFunction]:
        """Return a stage's settings, its code, and the flags of its script.

        Inputs become flags of the same name, unless they are only needed or empty. ``flags`` lists
        outputs and wildcards that become flags, too; ``flag=name`` renames one, and a name with a
        slash is a path, which may have wildcards. The record goes to ``--output`` by default, and
        all other outputs to ``--files``.
        """
        more = flags.split() if "=record" in flags else [*flags.split(), "output=record"]

        def words(wildcards: Any, input: Any, output: Any) -> list[str]:
            given = {name: value for name, value in input.items() if not name.startswith(NEEDED)}
            for flag, _, name in (word.partition("=") for word in more):
                path = name.format(**dict(wildcards.items())) if "/" in name else None
                given[flag] = path or output.get(name or flag) or wildcards.get(name or flag)
            made = [path for name, path in output.items() if name != "record"]
            # The folder of a fetched source may stay empty, so it is not an output.
            given["files"] = list(dict.fromkeys([*made, *filter(None, [given.get("directory")])]))
            # Snakemake passes one file as a text, several as a list.
            values = {f: [v] if isinstance(v, str) else list(v) for f, v in given.items()}
            return [word for f, value in values.items() if value for word in (f"--{f}", *value)]

        return {"spec": self.spec(stage), "code": self.code(stage), "flags": words}

    def command(
        self, stage: str, log: str = "2> {log:q}", *, environment: str = "", on_card: bool = False
    ) -> str:
        """Return the command for a stage's script, with ``params``; signals reach it, not a shell.

        The script records when it ran next to its log, and the cards of a job that is ``on_card``.
        """
        noted = f"{LOG}={{log:q}} {CARDS}={{resources.gpu}}" if on_card else f"{LOG}={{log:q}}"
        return (
            f'{noted} {environment} exec python "$EXPERTFLOW"/{stage}.py --spec {{params.spec:q}}'
            f" --code {{params.code}} {{params.flags:q}} {log}"
        )

    def spec(self, stage: str) -> InputFunction:
        return one_line(lambda wildcards: spec_text(stage, self._expert(wildcards), wildcards))

    def code(self, stage: str) -> InputFunction:
        """Return an input function for a stage's code digest, computed only when a job needs it."""
        return lambda wildcards: code_of(stage) if self._reads_code() else NOT_READ

    def lock(self, wildcards: Any) -> str:
        """Pin an expert's sources, once; return the lock's path."""
        path = f"results/{self._expert(wildcards).lock.expert}/sources.lock.json"
        self._on_lock(path)
        return path

    def source_lock(self, wildcards: Any) -> str:
        expert = self._expert(wildcards)
        path = f"{expert.results}/sources/locked/{expert.source_lock(wildcards.source).name}.json"
        self._on_lock(path)
        return path

    def source_records(self, wildcards: Any) -> list[str]:
        expert = self._expert(wildcards)
        return [_source_record(expert, source.name) for source in expert.lock.sources]

    def source_record(self, wildcards: Any) -> str:
        return _source_record(self._expert(wildcards), wildcards.source)

    def source_data(self, wildcards: Any) -> list[str]:
        """Return the folder that a generator writes; other sources' files are not made here."""
        expert, source = self._expert(wildcards), wildcards.source
        is_made = expert.source_lock(source).kind == "generated"
        return [f"{expert.results}/sources/generated/{source}"] if is_made else []

    def benchmarks(self, wildcards: Any) -> list[str]:
        """List the files that must not be trained on; a bundle does without them."""
        expert = self._expert(wildcards)
        return list(expert.benchmarks) if expert.bundle is None else []

    def document_shards(self, wildcards: Any) -> list[str]:
        return self._records("prepare_shard", wildcards)

    def token_shards(self, wildcards: Any) -> list[str]:
        return self._records("pretokenize_shard", wildcards)

    def _records(self, stage: str, wildcards: Any) -> list[str]:
        expert, made = self._expert(wildcards), STAGES[stage]
        places = expand_path(made, made.record, expert.lock.sources)
        return [f"{expert.results}/{place}" for place in places]

    def shards_to_tokenize(self, wildcards: Any) -> list[str]:
        expert, source, shard = self._expert(wildcards), wildcards.source, wildcards.shard
        names = token_shards(expert.source_lock(source).n_shards).get(shard)
        if names is None:
            raise ConfigError(
                f"{expert.results}/tokens/{source}/{shard}.json: there is no such shard"
            )
        return [f"{expert.results}/documents/{source}/{name}.json" for name in names]

    def tokenizer_shards(self, wildcards: Any) -> list[str]:
        """List the documents that a builtin tokenizer learns from; others read none."""
        settings = self._expert(wildcards).settings
        learns = settings["model"].startswith("builtin:") and settings["tokenizer"] is None
        return self.document_shards(wildcards) if learns else []

    def tokenizer_keep(self, wildcards: Any) -> list[str]:
        keep = self._expert(wildcards).results / "keep.arrow"
        return [str(keep)] if self.tokenizer_shards(wildcards) else []

    def tuning(self, wildcards: Any) -> list[str]:
        return self._expert(wildcards).tuning_files

    def calibration(self, wildcards: Any) -> list[str]:
        expert = self._expert(wildcards)
        return [f"{expert.results}/calibration.json"] if expert.config["calibrate"] else []

    @property
    def artifacts(self) -> dict[str, object]:
        """What scoring reads besides documents; the records of sources show changes."""
        return {
            f"{NEEDED}sources": self.source_records,
            f"{NEEDED}artifacts": ancient(self._artifacts),
        }

    def _artifacts(self, wildcards: Any) -> list[str]:
        expert = self._expert(wildcards)
        own, places = expert.own_artifacts, expert.artifacts
        generated = (place for key, place in places.items() if key not in own)
        # results/{expert}/sources/generated/{source}/…
        folders = [str(PurePath(*PurePath(place).parts[:5])) for place in generated]
        return [*folders, *(places[key] for key in own)]

    def ablation(self, wildcards: Any) -> list[str]:
        expert = self._expert(wildcards)
        return [f"{expert.results}/ablation.json"] if expert.config["ablate"] else []

    def variants(self, wildcards: Any) -> list[str]:
        """List the records of an expert's variants, in the order of their files."""
        expert = self._expert(wildcards)
        return [f"{expert.results}/ablation/{v.name}.json" for v in expert.ablation.variants]

    def variant_shards(self, wildcards: Any) -> list[str]:
        """List the documents of a variant that tokenizes in the loop."""
        return self.document_shards(wildcards) if self.variant_keep(wildcards) else []

    def variant_keep(self, wildcards: Any) -> list[str]:
        return self._of_variant(wildcards, "keep.arrow", rows="on_the_fly")

    def variant_staging(self, wildcards: Any) -> list[str]:
        return self._of_variant(wildcards, "staging.json", metric="read_speed")

    def _of_variant(self, wildcards: Any, name: str, **wanted: str) -> list[str]:
        expert = self._expert(wildcards)
        variant = variant_spec(expert.ablation, wildcards.variant).variant
        is_read = all(getattr(variant, key) == value for key, value in wanted.items())
        return [f"{expert.results}/{name}"] if is_read else []

    @property
    def processes(self) -> dict[str, InputFunction]:
        """The resources of a training: cards, and what starts a process on several machines."""

        def on_several(value: Any) -> InputFunction:
            return lambda wildcards: value if self.n_nodes(wildcards) else None

        # No tasks per GPU: otherwise the Slurm plugin requests them on top of the total.
        more = {"mpi": on_several("srun"), "tasks_per_gpu": on_several(0)}
        return {"gpu": self.n_gpus, "nodes": self.n_nodes, "tasks": self.n_nodes, **more}

    @property
    def retries(self) -> int:
        """A cluster job runs its own Snakemake, which would retry inside each retry."""
        return 3 if self._run.main else 0

    def attempt(self, wildcards: Any, attempt: int) -> int:
        """Return a job's attempt number, including those of the job that this run is part of."""
        return attempt + int(os.environ.get(ATTEMPT, "1")) - 1

    def n_gpus(self, wildcards: Any) -> int:
        limit = self._run.gpu_limit if self._run.main else None
        return machine.count_allowed_gpus(self._expert(wildcards).training, limit)

    def n_nodes(self, wildcards: Any) -> int | None:
        """Count the machines that train together; null, not a resource, for one."""
        return machine.count_nodes(self._expert(wildcards).training)

    def threads(self, wildcards: Any) -> int:
        """Count the cores of a job that trains or answers."""
        return machine.count_threads(self._expert(wildcards))

    def minutes(self, wildcards: Any) -> int:
        """Return how long a cluster should let a training run; nothing else reads it."""
        return machine.runtime_minutes(wildcards.expert)

    def export_memory(self, wildcards: Any) -> int:
        """Return the memory that a cluster should give an export; nothing else reads it."""
        return machine.export_memory_mb(wildcards.expert)

    def forecast(self, rule: str) -> InputFunction:
        """Return an input function for what a dry run's table shows of a job."""

        def found(wildcards: Any) -> str | None:
            if not self._shows_forecast(rule):
                return None
            forecaster = JobForecaster(self._expert(wildcards))
            if rule == "train_expert":
                return forecaster.forecast().text()
            return forecaster.forecast_job(rule, wildcards)

        return one_line(found)

    def _note_forecast(self, expert: ConfiguredExpert) -> None:
        """Print a training's forecast, unless a dry run's table has it, and what is scarce."""
        forecaster, name = Forecaster(expert), expert.name
        if scarce := forecaster.check_memory():
            note(scarce)
        card = self._run.told.get("hardware", "auto")
        if expert.preset == "demo" and card not in ("auto", "cpu"):
            note(f"{name}: hardware={card} has no effect in a demo; add preset=full")
        missing = no_gpu_reason() if expert.plan_spec.hardware == "auto" else None
        if missing:
            time = forecaster.forecast().time_text()
            note(f"{name}: {missing}; training uses the CPU and should take {time}")
        elif not self._run.looks:
            found = forecaster.forecast()
            cost = "" if found.usd is None else f", ${found.usd[0]:.2f} to ${found.usd[1]:.2f}"
            note(f"{name}: training on {found.hardware} should take {found.time_text()}{cost}")

    def priority(self, rule: str, priority: int = 0) -> Callable[[Any], int]:
        """Return a function that gives a rule's priority, and ends the run if the rule cannot run.

        Snakemake asks for the priorities of all pending jobs before it starts or lists the first,
        but for a job's resources only when all jobs before it are done.
        """

        @cache
        def check(name: str) -> None:
            expert = self._expert(SimpleNamespace(expert=name))
            machine.check_machine(expert, rule)
            if rule == "train_expert":
                self._note_forecast(expert)

        def found(wildcards: Any) -> int:
            if self._run.main and self._run.checks:
                one_line(check)(wildcards.expert)
            return priority

        return found


def _source_record(expert: ConfiguredExpert, source: str) -> str:
    kind = "generated" if expert.source_lock(source).kind == "generated" else "fetched"
    return f"{expert.results}/sources/{kind}/{source}.json"
