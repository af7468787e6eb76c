"""What the Snakefile asks: which experts, which shards, which spec and which code for a rule.

Experts are loaded, checked and locked when Snakemake first asks for one of their files, so a fault
in one manifest does not stop the others. A user's mistake ends in one line.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from expertflow.config import digest, specs
from expertflow.config.expected_work import Case
from expertflow.config.forecast import forecast, is_current
from expertflow.config.guard import fail, note, one_line
from expertflow.config.hardware_tables import HardwareTables
from expertflow.config.load import Schemas, load_config, load_expert
from expertflow.core.errors import ConfigError
from expertflow.core.files import canonical_json
from expertflow.core.records import read_record, to_json
from expertflow.data.lock import HashCache, lock_sources, unresolved_hub_sources, write_lock
from expertflow.data.records import ExpertLock, SourceLock
from expertflow.data.settings import SourceSpec
from expertflow.data.shards import shard_names, token_shards

GENERATORS = "expertflow.data.sources.generated"
# Files that a script reads beside its imports: a change of theirs is a change of its code.
REPORT = "scripts/expertflow/report"
RESOURCES = {
    "build_report": (
        "schemas/report.schema.yaml",
        f"{REPORT}/page.html.j2",
        f"{REPORT}/style.css",
    ),
    "compare_experts": (
        "schemas/report.schema.yaml",
        f"{REPORT}/index.html.j2",
        f"{REPORT}/style.css",
    ),
}


def code_extras(script: Path) -> tuple[Path, ...]:
    """List the files that belong to a script's code without being imported."""
    return tuple(script.parents[1] / name for name in RESOURCES.get(script.stem, ()))


class House:
    """The configured workflow. ``main`` is false in the jobs that Snakemake starts elsewhere."""

    @one_line
    def __init__(self, *, config: dict[str, Any], basedir: Path, main: bool) -> None:
        self.workflow_dir = basedir / "workflow"
        self.scripts = self.workflow_dir / "scripts"
        self.main = main
        self.schemas = Schemas.read(self.workflow_dir / "schemas")
        self.config = load_config(config, self.schemas)
        self.directories = [Path("config"), basedir / "config"]
        self._hardware = HardwareTables(self.config, self.directories, self.workflow_dir)
        self._hashes = HashCache(Path("state/hashes.json"))
        self._experts: dict[str, dict[str, Any]] = {}
        self._locks: dict[str, ExpertLock] = {}

    @property
    def experts(self) -> list[str]:
        """Name the experts of the configuration."""
        return list(self.config["experts"])

    @one_line
    def expert(self, name: str) -> dict[str, Any]:
        """Give an expert's settings, loaded once."""
        if name not in self._experts:
            self._experts[name] = load_expert(
                name,
                directories=[d / "experts" for d in self.directories],
                config=self.config,
                schemas=self.schemas,
            )
        return self._experts[name]

    def lock(self, name: str) -> str:
        """Pin an expert's sources, once; give the lock's path."""
        self._lock(name)
        return f"results/{name}/sources.lock.json"

    def source_lock(self, name: str, source: str) -> str:
        """Pin an expert's sources, once; give the path of one source's own lock."""
        return self._own_lock(name, self._source_lock(name, source))

    def source_records(self, name: str) -> list[str]:
        """List the records of an expert's sources."""
        return [self._source_record(name, source) for source in self._lock(name).sources]

    def source_record(self, name: str, source: str) -> str:
        """Give the record of one source."""
        return self._source_record(name, self._source_lock(name, source))

    def source_data(self, name: str, source: str) -> list[str]:
        """Give the folder that a generator writes; other sources' files are not made here."""
        lock = self._source_lock(name, source)
        is_made = lock.kind == "generated"
        return [f"results/{name}/sources/generated/{source}"] if is_made else []

    def shards(self, name: str) -> list[str]:
        """List the records of an expert's documents, in their order."""
        return [
            f"results/{name}/documents/{source.name}/{shard}.json"
            for source in self._lock(name).sources
            for shard in shard_names(source.n_shards)
        ]

    def token_shards(self, name: str) -> list[str]:
        """List the records of an expert's tokens, in the order of the documents."""
        return [
            f"results/{name}/tokens/{source.name}/{shard}.json"
            for source in self._lock(name).sources
            for shard in token_shards(source.n_shards)
        ]

    def shards_to_tokenise(self, name: str, source: str, shard: str) -> list[str]:
        """List the records of the documents that one token shard holds."""
        names = token_shards(self._source_lock(name, source).n_shards).get(shard)
        if names is None:
            fail(f"results/{name}/tokens/{source}/{shard}.json: there is no such shard")
        return [f"results/{name}/documents/{source}/{document}.json" for document in names]

    def model_inputs(self, name: str) -> tuple[list[str], list[str]]:
        """List what ``prepare_model`` reads: documents only where a tokenizer learns from them."""
        expert = self.expert(name)
        if expert["model"].startswith("builtin:") and expert["tokenizer"] is None:
            return self.shards(name), [f"results/{name}/keep.arrow"]
        return [], []

    @one_line
    def spec(self, rule: str, wildcards: Any) -> str:
        """Give a rule's settings as canonical JSON; this is what Snakemake compares."""
        build = getattr(self, f"_spec_{rule}")
        return canonical_json(to_json(build(wildcards.expert, wildcards)))

    @one_line
    def forecast(self, name: str) -> str:
        """Say what an expert's training should take, in one line for a dry run."""
        case = Case(
            results=Path("results", name),
            expert=self.expert(name),
            spec=self._hardware.plan_spec(self.expert(name)),
            lock=self._lock(name),
            is_current=lambda rule, record, **of: is_current(
                record,
                spec=self.spec(rule, SimpleNamespace(expert=name, **of)),
                code=self.code(rule),
            ),
        )
        return forecast(case).text()

    @functools.cache  # noqa: B019  (one House lives as long as the process)
    def code(self, rule: str) -> str:
        """Give the digest of a rule's script and all it imports."""
        script = self.scripts / f"{rule}.py"
        return digest.code_digest(script, extra=code_extras(script))

    @one_line
    def _lock(self, name: str) -> ExpertLock:
        if name not in self._locks:
            path = Path(f"results/{name}/sources.lock.json")
            if self.main:
                self._refuse_other_preset(name)
                lock = lock_sources(
                    name,
                    specs.source_specs(self.expert(name)),
                    hashes=self._hashes,
                    generator_digest=self._generator_digest,
                )
                self._hashes.save()
                write_lock(path, lock)
                for source in lock.sources:
                    # A source's jobs read its own lock, so that they run for its changes alone.
                    own = Path(self._own_lock(name, source))
                    write_lock(own, ExpertLock(expert=name, sources=(source,)))
                self._locks[name] = lock
                for unresolved in unresolved_hub_sources(specs.source_specs(self.expert(name))):
                    note(f"{name}: {unresolved}: revision not resolved yet; fetch_source pins it")
            else:
                self._locks[name] = read_record(ExpertLock, path)
        return self._locks[name]

    def _refuse_other_preset(self, name: str) -> None:
        wanted = self.config["preset"]
        if self.config["allow_preset_change"]:
            return
        # The first records that jobs write; the lock will not do, since a dry run writes it too.
        for path in sorted(Path(f"results/{name}/sources").glob("*/*.json")):
            there = json.loads(path.read_text(encoding="utf-8")).get("preset")
            if there not in (None, wanted):
                raise ConfigError(
                    f"results/{name} holds the {there} preset and this run is {wanted}; move it"
                    " away, use --directory, or allow it with --config allow_preset_change=true"
                )

    def _generator_digest(self, generator: str) -> str:
        return digest.module_digest(f"{GENERATORS}.{generator}", self.scripts)

    def _source_lock(self, name: str, source: str) -> SourceLock:
        for lock in self._lock(name).sources:
            if lock.name == source:
                return lock
        fail(f"expert {name} has no source {source!r}; see its manifest")

    def _own_lock(self, name: str, lock: SourceLock) -> str:
        return f"results/{name}/sources/locked/{lock.name}.json"

    def _source_record(self, name: str, lock: SourceLock) -> str:
        kind = "generated" if lock.kind == "generated" else "fetched"
        return f"results/{name}/sources/{kind}/{lock.name}.json"

    def _source(self, name: str, source: str) -> SourceSpec:
        return next(s for s in specs.source_specs(self.expert(name)) if s.name == source)

    def _spec_fetch_source(self, name: str, wildcards: Any) -> Any:
        source = self._source(name, wildcards.source)
        return specs.fetch_spec(source, preset=self.config["preset"])

    _spec_generate_source = _spec_fetch_source

    def _spec_find_datasets(self, name: str, _: Any) -> Any:
        licences = {source["name"]: source["licence"] for source in self.expert(name)["sources"]}
        return {"expert": name, "preset": self.config["preset"], "licences": licences}

    def _spec_prepare_shard(self, name: str, wildcards: Any) -> Any:
        expert = self.expert(name)
        benchmarks = [Path(path) for path in self.benchmarks(name)]
        source = self._source(name, wildcards.source)
        return specs.prepare_spec(expert, source, self._content(benchmarks))

    def _spec_deduplicate_documents(self, name: str, _: Any) -> Any:
        return specs.deduplicate_spec(self.expert(name))

    def _spec_prepare_model(self, name: str, _: Any) -> Any:
        expert = self.expert(name)
        folders = [Path(p).expanduser() for p in (expert["model"], expert["tokenizer"]) if p]
        files = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())]
        files.append(Path(expert["data"]["chat_template"]).expanduser())
        return specs.model_spec(expert, self._content(files))

    def _spec_pretokenize_shard(self, name: str, _: Any) -> Any:
        return specs.token_spec(self.expert(name))

    def _spec_pack_sequences(self, name: str, _: Any) -> Any:
        return specs.packing_spec(self.expert(name))

    def _spec_plan_training(self, name: str, _: Any) -> Any:
        return self._hardware.plan_spec(self.expert(name))

    def _spec_calibrate_expert(self, name: str, _: Any) -> Any:
        return self._hardware.calibration_spec(self.expert(name))

    def _spec_stage_to_nvme(self, name: str, _: Any) -> Any:
        return specs.stage_spec(self.config)

    def _spec_train_expert(self, name: str, _: Any) -> Any:
        return {"expert": name}

    def _spec_evaluate_expert(self, name: str, _: Any) -> Any:
        expert = self.expert(name)
        own = [Path(place) for place in expert["evaluation"]["artefacts"].values()]
        return specs.evaluation_spec(expert, self._artefacts(name), self._content(own))

    def _spec_export_model(self, name: str, _: Any) -> Any:
        expert = self.expert(name)
        description = expert["description"]
        return {"expert": name, "description": description, "decoding": expert["decoding"]}

    def _spec_build_report(self, name: str, _: Any) -> Any:
        return specs.report_spec(name, self.expert(name), self.config)

    def benchmarks(self, name: str) -> list[str]:
        """List the benchmark files that must not be trained on."""
        return [benchmark["path"] for benchmark in self.expert(name)["data"]["benchmarks"]]

    def artefacts(self, name: str) -> list[str]:
        """List what scoring reads besides documents: a user's file, or a generator's folder."""
        made = f"results/{name}/sources/generated"
        places = self.expert(name)["evaluation"]["artefacts"].values()
        return [f"{made}/{p.split(':')[0]}" if ":" in p else p for p in places]

    def _artefacts(self, name: str) -> dict[str, str]:
        """Give the files that scoring reads; source:file lies in a generated source's folder."""
        made = f"results/{name}/sources/generated"
        return {
            key: f"{made}/{place.replace(':', '/')}" if ":" in place else place
            for key, place in self.expert(name)["evaluation"]["artefacts"].items()
        }

    def _content(self, files: list[Path]) -> dict[str, str]:
        """Hash the user's own files, so that a changed one counts and a touched one does not."""
        found = {str(file): self._hashes.sha256(file) for file in files if file.is_file()}
        if self.main:
            self._hashes.save()
        return found
