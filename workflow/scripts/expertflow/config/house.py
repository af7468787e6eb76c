"""What the Snakefile asks: which experts, which shards, which spec and which code for a rule.

Experts are loaded, checked and locked when Snakemake first asks for one of their files, so a fault
in one manifest does not stop the others. A user's mistake ends in one line.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from expertflow.config import rule_code, specs
from expertflow.config.ablations import variant_spec
from expertflow.config.digest import parsed_modules
from expertflow.config.expected_work import Case as Work
from expertflow.config.forecast import forecast, is_current
from expertflow.config.guard import fail, note, one_line
from expertflow.config.hardware_tables import HardwareTables
from expertflow.config.load import Schemas, load_config, load_expert
from expertflow.config.opened import Case, note_case, opened_case
from expertflow.config.rule_specs import RuleSpecs
from expertflow.config.tuning import tuned_file
from expertflow.core.errors import ConfigError
from expertflow.core.records import read_record
from expertflow.data.lock import HashCache, lock_sources, unresolved_hub_sources, write_lock
from expertflow.data.records import ExpertLock, SourceLock
from expertflow.data.shards import shard_names, token_shards


class House:
    """The configured workflow. ``main`` is false in the jobs that Snakemake starts elsewhere.

    ``looks``: nothing is run. ``told`` is what the command line says of the configuration; it wins
    over an opened bundle.
    """

    @one_line
    def __init__(
        self,
        *,
        config: dict[str, Any],
        basedir: Path,
        main: bool,
        looks: bool = False,
        told: dict[str, Any] | None = None,
    ) -> None:
        self.workflow_dir = basedir / "workflow"
        self.scripts = self.workflow_dir / "scripts"
        self.main, self._looks = main, looks
        self.schemas = Schemas.read(self.workflow_dir / "schemas")
        self.config = load_config(config, self.schemas)
        self.directories = [Path("config"), basedir / "config"]
        self._raw, self._told = config, told or {}
        self._hashes = HashCache(Path("state/hashes.json"))
        parsed_modules.keep_in(Path("state/code.json"))
        self._experts: dict[str, dict[str, Any]] = {}
        self._locks: dict[str, ExpertLock] = {}
        self._cases: dict[str, Case] = {}
        self._specs = RuleSpecs(
            case=self._case,
            expert=self.expert,
            scripts=self.scripts,
            hashes=self._hashes,
            main=main,
        )
        self.benchmarks = self._specs.benchmarks
        self.artefacts = self._specs.artefacts

    @property
    def experts(self) -> list[str]:
        """Name the experts of the configuration."""
        return list(self.config["experts"])

    @one_line
    def expert(self, name: str) -> dict[str, Any]:
        """Give an expert's settings, loaded once."""
        if name not in self._experts:
            case = self._case(name)
            self._experts[name] = load_expert(
                name,
                directories=[d / "experts" for d in case.directories],
                config=case.config,
                schemas=self.schemas,
                bundled=case.content,
                told=case.told,
            )
        return self._experts[name]

    def calibration(self, name: str) -> list[str]:
        """Give the calibration that an expert's plan goes by, where one is asked for."""
        return [f"results/{name}/calibration.json"] if self._case(name).config["calibrate"] else []

    def ablation(self, name: str) -> list[str]:
        """Give the ablation that an expert's report shows, where one is asked for."""
        return [f"results/{name}/ablation.json"] if self._case(name).config["ablate"] else []

    @one_line
    def variants(self, name: str) -> list[str]:
        """List the records of an expert's variants, in the order of their files."""
        variants = self._specs.ablation(name).variants
        return [f"results/{name}/ablation/{variant.name}.json" for variant in variants]

    @one_line
    def variant_inputs(self, name: str, variant: str) -> dict[str, list[str]]:
        """Name what one variant reads besides the plan, rows and model."""
        kind = variant_spec(self._specs.ablation(name), variant).variant
        loose, speed = kind.rows == "on_the_fly", kind.metric == "read_speed"
        return {
            "shards": self.shards(name) if loose else [],
            "keep": [f"results/{name}/keep.arrow"] if loose else [],
            "staging": [f"results/{name}/staging.json"] if speed else [],
        }

    @one_line
    def tuned(self, name: str) -> list[str]:
        """Give the tuning that an expert's plan goes by, where its manifest names one."""
        return tuned_file(name, self.expert(name)["training"]["tuned"], self._case(name).spec)

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
        return self._specs.text(rule, wildcards)

    @one_line
    def forecast(self, name: str) -> str:
        """Say what an expert's training should take, in one line for a dry run."""
        work = Work(
            results=Path("results", name),
            expert=self.expert(name),
            spec=self._case(name).hardware.plan_spec(self.expert(name)),
            lock=self._lock(name),
            is_current=lambda rule, record, **of: is_current(
                record,
                spec=self.spec(rule, SimpleNamespace(expert=name, **of)),
                code=self.code(rule),
            ),
        )
        return forecast(work).text()

    @functools.cache  # noqa: B019  (one House lives as long as the process)
    def code(self, rule: str) -> str:
        """Give the digest of a rule's script and all it imports."""
        return rule_code.rule_digest(rule, self.scripts)

    @one_line
    def _case(self, name: str) -> Case:
        if name not in self._cases:
            own = Case(
                config=self.config,
                directories=self.directories,
                hardware=HardwareTables(self.config, self.directories, self.workflow_dir),
                told=self._told,
            )
            case = opened_case(
                name,
                own=own,
                raw=self._raw,
                told=self._told,
                schemas=self.schemas,
                workflow_dir=self.workflow_dir,
            )
            if self.main:
                note_case(name, case, self.directories)
            self._cases[name] = case
        return self._cases[name]

    @one_line
    def _lock(self, name: str) -> ExpertLock:
        if name not in self._locks:
            path = Path(f"results/{name}/sources.lock.json")
            if self.main:
                self._refuse_other_preset(name)
                bundle = self._case(name).bundle
                lock = lock_sources(
                    name,
                    specs.source_specs(self.expert(name)),
                    hashes=self._hashes,
                    generator_digest=self._generator_digest,
                    bundled=None if bundle is None else bundle.index.lock,
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
        wanted = self._case(name).config["preset"]
        if self.config["allow_preset_change"]:
            return
        # The first records that jobs write; the lock will not do, since a dry run writes it too.
        for path in sorted(Path(f"results/{name}/sources").glob("*/*.json")):
            try:
                there = json.loads(path.read_bytes()).get("preset")
            except ValueError:
                # Spoilt: it says nothing, and a run makes it again.
                continue
            if there not in (None, wanted):
                held = f"results/{name} holds the {there} preset and this run is {wanted}"
                if self._looks:
                    note(f"{held}: with --config allow_preset_change=true it would replace it")
                    return
                raise ConfigError(
                    f"{held}; move it away, use --directory, or allow it with --config"
                    " allow_preset_change=true"
                )

    def _generator_digest(self, generator: str) -> str:
        return rule_code.generator_digest(generator, self.scripts)

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
