"""The bridge to Snakemake: what rules ask for their inputs, resources, settings and code.

Its methods are Snakemake's input functions themselves. Experts are loaded, checked and locked when
Snakemake first asks for one of their files, so a fault in one manifest does not stop the others. A
user's mistake ends in one line.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from expertflow.config import allocation
from expertflow.config.ablations import variant_spec
from expertflow.config.code_digest import parsed_modules, rule_digest
from expertflow.config.expert import Expert, Setup
from expertflow.config.forecast import Case, forecast
from expertflow.config.guard import one_line
from expertflow.config.load import Schemas, load_config
from expertflow.config.specs import spec_text
from expertflow.core.errors import ConfigError
from expertflow.data.lock import HashCache
from expertflow.data.shards import shard_names, token_shards

C = TypeVar("C", bound=type)
Settings = dict[str, Any]


def in_one_line(cls: C) -> C:
    """Let every method end Snakemake with one line for a user's error."""
    for name, method in list(vars(cls).items()):
        if callable(method):
            setattr(cls, name, one_line(method))
    return cls


@in_one_line
class Workflow:
    """The configured workflow. ``main`` is false in the jobs that Snakemake starts elsewhere.

    ``looks``: nothing is run. ``told`` is what the command line says of the configuration; it wins
    over an opened bundle. ``gpu_limit`` is Snakemake's for the whole run.
    """

    def __init__(
        self,
        *,
        config: Settings,
        basedir: Path,
        main: bool,
        looks: bool = False,
        told: Settings | None = None,
        gpu_limit: Any = None,
    ) -> None:
        self.main, self.scripts = main, basedir / "workflow" / "scripts"
        self._gpu_limit = gpu_limit
        schemas = Schemas.read(basedir / "workflow" / "schemas")
        self._setup = Setup(
            raw=config,
            told=told or {},
            config=load_config(config, schemas),
            schemas=schemas,
            directories=[Path("config"), basedir / "config"],
            workflow_dir=basedir / "workflow",
            hashes=HashCache(Path("state/hashes.json")),
            main=main,
            looks=looks,
        )
        self.experts: list[str] = list(self._setup.config["experts"])
        self._loaded: dict[str, Expert] = {}
        parsed_modules.keep_in(Path("state/code.json"))

    def _expert(self, wildcards: Any) -> Expert:
        name = wildcards.expert
        if name not in self._loaded:
            self._loaded[name] = Expert(name, self._setup)
        return self._loaded[name]

    def spec(self, rule: str) -> Callable[[Any], str]:
        return one_line(lambda wildcards: spec_text(rule, self._expert(wildcards), wildcards))

    def code(self, rule: str) -> Callable[[Any], str]:
        """Return what gives a rule's code once a job needs it: hashing all rules takes a while."""
        return lambda wildcards: _code(rule, self.scripts)

    def lock(self, wildcards: Any) -> str:
        """Pin an expert's sources, once; return the lock's path."""
        return f"results/{self._expert(wildcards).lock.expert}/sources.lock.json"

    def source_lock(self, wildcards: Any) -> str:
        expert = self._expert(wildcards)
        name = expert.source_lock(wildcards.source).name
        return f"{expert.results}/sources/locked/{name}.json"

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
        """List the files that must not be trained on; a bundle makes do without them."""
        expert = self._expert(wildcards)
        return list(expert.benchmarks) if expert.bundle is None else []

    def document_shards(self, wildcards: Any) -> list[str]:
        """List the records of an expert's documents, in their order."""
        expert = self._expert(wildcards)
        return [
            f"{expert.results}/documents/{source.name}/{shard}.json"
            for source in expert.lock.sources
            for shard in shard_names(source.n_shards)
        ]

    def token_shards(self, wildcards: Any) -> list[str]:
        """List the records of an expert's tokens, in the order of the documents."""
        expert = self._expert(wildcards)
        return [
            f"{expert.results}/tokens/{source.name}/{shard}.json"
            for source in expert.lock.sources
            for shard in token_shards(source.n_shards)
        ]

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
        return self._expert(wildcards).tuned_files

    def calibration(self, wildcards: Any) -> list[str]:
        expert = self._expert(wildcards)
        return [f"{expert.results}/calibration.json"] if expert.config["calibrate"] else []

    def artefacts(self, wildcards: Any) -> list[str]:
        """List what scoring reads besides documents: a user's file, or a generator's folder."""
        expert = self._expert(wildcards)
        own, places = expert.own_artefacts, expert.artefacts
        named = expert.settings["evaluation"]["artefacts"].items()
        made = f"{expert.results}/sources/generated"
        return [
            places[key] if key in own else f"{made}/{place.split(':')[0]}" for key, place in named
        ]

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
        expert = self._expert(wildcards)
        variant = variant_spec(expert.ablation, wildcards.variant).variant
        return [f"{expert.results}/keep.arrow"] if variant.rows == "on_the_fly" else []

    def variant_staging(self, wildcards: Any) -> list[str]:
        expert = self._expert(wildcards)
        variant = variant_spec(expert.ablation, wildcards.variant).variant
        return [f"{expert.results}/staging.json"] if variant.metric == "read_speed" else []

    def n_gpus(self, wildcards: Any) -> int:
        limit = self._gpu_limit if self.main else None
        return allocation.n_gpus(self._expert(wildcards).settings["training"], limit)

    def n_nodes(self, wildcards: Any) -> int | None:
        """Count the machines that train together; null, no resource, where it is one."""
        return allocation.n_nodes(self._expert(wildcards).settings["training"])

    def mpi(self, wildcards: Any) -> str | None:
        """Name what starts a process on each of several machines."""
        return "srun" if self.n_nodes(wildcards) else None

    def tasks_per_gpu(self, wildcards: Any) -> int | None:
        """Keep the Slurm plugin from asking for ``tasks`` at every card, besides those in all."""
        return 0 if self.n_nodes(wildcards) else None

    def minutes(self, wildcards: Any) -> int:
        """Return how long a cluster should let a training run; nothing else reads it."""
        return allocation.runtime_minutes(wildcards.expert)

    def forecast(self, wildcards: Any) -> str:
        expert = self._expert(wildcards)

        def made_by(rule: str, **of: str) -> tuple[str, str]:
            spec = spec_text(rule, expert, SimpleNamespace(expert=expert.name, **of))
            return spec, _code(rule, self.scripts)

        return forecast(Case(expert=expert, made_by=made_by)).text()

    def refuse_misfits(self, jobs: list[Any]) -> None:
        """End the run before its first job if a training asks for what it cannot get.

        Snakemake asks for a job's resources only when all jobs before it are done.
        """
        for job in jobs:
            if job.rule.name in allocation.TRAIN:
                self.n_gpus(job.wildcards)
                self.n_nodes(job.wildcards)


def files_of(records: Callable[[Any], list[str]], *suffixes: str) -> Callable[[Any], list[str]]:
    """Return an input function that lists the files behind the records of shards."""

    def files(wildcards: Any) -> list[str]:
        stems = [record.removesuffix(".json") for record in records(wildcards)]
        return [stem + suffix for stem in stems for suffix in suffixes]

    return files


def _source_record(expert: Expert, source: str) -> str:
    kind = "generated" if expert.source_lock(source).kind == "generated" else "fetched"
    return f"{expert.results}/sources/{kind}/{source}.json"


@cache
def _code(rule: str, scripts: Path) -> str:
    return rule_digest(rule, scripts)
