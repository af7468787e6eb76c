"""An expert as configured: where its settings come from, its lock, and the user's files.

If its bundle was opened, the settings are those it was made with, unless overridden: this machine's
configuration applies to what belongs to the machine; for what was decided where the bundle was
made, the bundle's applies, and over it the command line.
"""

import contextlib
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from msgspec import field
from msgspec.structs import replace

from expertflow.config.ablations import ablation_files, ablation_spec
from expertflow.config.code_digest import GENERATOR, rule_digest
from expertflow.config.guard import note
from expertflow.config.hardware_tables import HardwareTables
from expertflow.config.load import (
    find_manifest,
    hash_manifest,
    load_config,
    load_expert,
    merge_settings,
)
from expertflow.config.read_yaml import Settings
from expertflow.config.validate import FOLDERS
from expertflow.core.disk import check_space
from expertflow.core.errors import ConfigError
from expertflow.core.hashes import HashCache
from expertflow.core.records import Record, from_json, read_record
from expertflow.core.settings import without_auto
from expertflow.data.lock import list_unresolved_hub_sources, lock_sources, write_lock
from expertflow.data.records import ExpertLock, SourceLock
from expertflow.data.settings import SourceSpec
from expertflow.evaluate.records import OWN_TASK, redact_address
from expertflow.evaluate.scoring import is_own_task
from expertflow.plan.records import PlanSpec
from expertflow.plan.settings import TrainingSection
from expertflow.rental.bundle.records import (
    CARRIED,
    OPENED,
    BundleSpec,
    OpenedBundle,
    SettingsFile,
    artifact_path,
    tuning_path,
)
from expertflow.studies.records import AblationSpec
from expertflow.train.model.init_adapter import hash_adapter

# Files that identify a model.
DECISIVE = (".safetensors", "/tokenizer.json")
# What tune_expert makes.
TUNING_MADE = re.compile(r"results/[^/]+/tuning\.json")
ROOM_TO_START = 1_000_000


def check_writable(*folders: Path, needs_room: bool = True) -> None:
    """Refuse folders that cannot be written or created or, if ``needs_room``, whose disk is full.

    Raises ConfigError or HardwareError with the first one.
    """
    for folder in folders:
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            problem = "cannot be written" if existing.is_dir() else "is not a folder"
            raise ConfigError(f"{existing}: {problem}; correct its permissions, or use --directory")
        # Without room for its log, Snakemake prints a traceback for every line.
        if needs_room:
            check_space([(folder, ROOM_TO_START, "logs and records")])


class RunContext(Record, frozen=True, kw_only=True):
    """The configuration and the purpose of a run of Snakemake.

    ``config`` is the configuration before it is checked, ``told`` the part from the command line.
    ``main`` is false in the jobs that Snakemake starts elsewhere. ``looks``: nothing is run.
    ``gpu_limit`` is Snakemake's for all jobs together. ``elsewhere``: other machines run the jobs.
    ``checks``: jobs are run or listed, so their requirements are checked.
    """

    config: Settings
    main: bool = True
    told: Settings = field(default_factory=dict)
    looks: bool = False
    gpu_limit: int | None = None
    elsewhere: bool = False
    checks: bool = True


class ConfiguredExpert:
    """An expert whose settings are loaded, checked and locked on first use.

    ``config`` is the run's checked configuration, or that of an opened bundle. ``told`` are the
    parts from command lines: where the bundle was made, and here.
    """

    def __init__(self, name: str, run: RunContext, config: Settings, hashes: HashCache) -> None:
        self.name, self.run, self.hashes = name, run, hashes
        self.results = Path("results", name)
        self.config, self.told = config, [run.told]
        self.folders: Sequence[Path] = FOLDERS
        marker = self.results / OPENED
        self.opened = read_record(OpenedBundle, marker) if marker.is_file() else None
        self.bundle = None if self.opened is None else self.opened.index.spec
        # The bundle's files, and what it left out: this machine's cards and prices.
        carried = [self.results / CARRIED, *FOLDERS]
        if self.opened is not None:
            if self.bundle is None:
                raise ConfigError(
                    f"{marker}: contains no settings; open the bundle again with --replace"
                )
            self._use_bundle(self.bundle, self.opened, carried)
        self.hardware = HardwareTables(self.config, carried if self.opened else FOLDERS)

    def _use_bundle(self, bundle: BundleSpec, opened: OpenedBundle, carried: list[Path]) -> None:
        run, made = self.run, bundle.config
        experts = {**run.config["experts"], **made["experts"]}
        merged = merge_settings({**run.config, **made, "experts": experts}, run.told)
        self.config = load_config(merged, run.told)
        self.told = [bundle.told, run.told]
        place = f"{self.results}/{CARRIED}/experts"
        files = bundle.files.items()
        made_with = next((file.sha256 for key, file in files if key.startswith("experts/")), None)
        if hash_manifest(self.name, FOLDERS) == opened.settings_here:
            self.folders = carried
            if run.main and opened.settings_here not in (None, made_with):
                note(
                    f"{self.name}: uses the manifest of its bundle, in {place}; the one in"
                    " config/experts differs"
                )
        elif run.main:
            note(
                f"{self.name}: its manifest in config/experts changed since its bundle was opened,"
                f" and is used; the bundle's is in {place}"
            )

    @cached_property
    def settings(self) -> Settings:
        """The manifest's settings with all overrides.

        Raises ConfigError if they are wrong, or not of the opened bundle's preset.
        """
        settings = load_expert(
            self.name,
            folders=[folder / "experts" for folder in self.folders],
            config=self.config,
            bundled=None if self.bundle is None else self.bundle.content,
            told=self.told,
        )
        task = settings["evaluation"]["task"]
        if self.opened is not None and is_own_task(task) and not self.opened.allow_own_code:
            raise ConfigError(
                f"{self.results}: its evaluation.task is {task}, code that would run with your"
                " rights, but the bundle was opened without --allow-own-code; open it again with it"
            )
        judge = settings["evaluation"]["judge"] or {}
        key = judge.get("api_key_env")
        if self.opened is not None and key is not None and not self.opened.allow_judge:
            raise ConfigError(
                f"{self.results}: its evaluation.judge sends {key}, a variable of your environment,"
                f" to {redact_address(judge['endpoint'])}, but the bundle was opened without"
                " --allow-judge; check both, and open it again with it"
            )
        made = settings["preset"] if self.bundle is None else self.bundle.config["preset"]
        if "preset" in self.run.told and made != settings["preset"]:
            raise ConfigError(
                f"{self.results} is an opened bundle of the {made} preset, but the command line"
                f" has preset={self.config['preset']}; remove it, or bundle with that preset"
            )
        return settings

    @property
    def preset(self) -> str:
        """The preset of the settings; without a demo block always ``full``."""
        return str(self.settings["preset"])

    @cached_property
    def sources(self) -> dict[str, SourceSpec]:
        return {source.name: source for source in source_specs(self.settings)}

    @cached_property
    def plan_spec(self) -> PlanSpec:
        spec = self.hardware.plan_spec(self.settings)
        adapter = spec.lora and spec.lora.init_from
        for key, place in (("model", self.settings["model"]), ("training.lora.init_from", adapter)):
            if place and Path(place).expanduser().resolve().is_relative_to(self.results.resolve()):
                # Snakemake deletes a job's outputs before it starts.
                raise ConfigError(
                    f"expert {self.name}: {key} is {place}, which this run replaces; use a copy"
                )
        if spec.lora is None or adapter is None:
            return spec
        # By content: a different adapter at the same path is a different training.
        sha256 = hash_adapter(spec.lora, self.hashes.sha256)
        return replace(spec, lora=replace(spec.lora, init_sha256=sha256))

    @cached_property
    def ablation(self) -> AblationSpec:
        config = {**self.config, "preset": self.preset}
        return ablation_spec(config, self.folders)

    @cached_property
    def lock(self) -> ExpertLock:
        """The contents of the sources, pinned once; a job uses what the run pinned.

        Raises:
            ConfigError: the run would replace results of the other preset without permission.
        """
        path = self.results / "sources.lock.json"
        if not self.run.main:
            return read_record(ExpertLock, path)
        folders = self.results, Path("state"), Path("state", self.name)
        check_writable(*folders, needs_room=self.run.checks)
        # A demo's results would replace a full run's, perhaps the work of days.
        held, looks = self._held_preset, self.run.looks
        if held is not None and not self.config["allow_preset_change"]:
            conflict = f"{self.results} is of the {held} preset and this run is {self.preset}"
            option = "--config allow_preset_change=true"
            if not looks:
                raise ConfigError(f"{conflict}; move it away, or replace it with {option}")
            note(f"{conflict}; a run replaces it only with {option}")
        self.hashes.path.parent.mkdir(parents=True, exist_ok=True)
        sources = tuple(self.sources.values())
        lock = lock_sources(
            self.name,
            sources,
            hashes=self.hashes,
            generator_digest=lambda generator: rule_digest(GENERATOR + generator),
            bundled=None if self.opened is None else self.opened.index.lock,
        )
        self.hashes.save()
        # A source's jobs read its own lock, so that only its changes rerun them.
        locks = {f"sources/locked/{source.name}.json": (source,) for source in lock.sources}
        for name, pinned in {path.name: lock.sources, **locks}.items():
            # A look at another preset must not change the locks of the existing results.
            if held is None or not looks or not (self.results / name).is_file():
                write_lock(self.results / name, ExpertLock(expert=self.name, sources=pinned))
        for unresolved in list_unresolved_hub_sources(sources):
            note(f"{self.name}: {unresolved}: revision not resolved yet; fetch_source pins it")
        return lock

    def source_lock(self, source: str) -> SourceLock:
        for lock in self.lock.sources:
            if lock.name == source:
                return lock
        raise ConfigError(f"expert {self.name} has no source {source!r}; see its manifest")

    @property
    def _held_preset(self) -> str | None:
        """The preset of the existing results, if it differs from this run's."""
        # The first records that jobs write; the lock will not do, since a dry run writes it too.
        for path in sorted((self.results / "sources").glob("*/*.json")):
            # A truncated record says nothing, and a run makes it again.
            with contextlib.suppress(ValueError):
                preset: str | None = json.loads(path.read_bytes()).get("preset")
                if preset not in (None, self.preset):
                    return preset
        return None

    @property
    def benchmarks(self) -> dict[str, list[Path]]:
        """The benchmark files, by the manifest's path, for ``hash_content``."""
        named = [benchmark["path"] for benchmark in self.settings["data"]["benchmarks"]]
        return {path: [Path(path)] for path in named}

    @property
    def model_files(self) -> dict[str, list[Path]]:
        """The user's files that a base model is made from, by their names in the manifest."""
        folders = filter(None, (self.settings["model"], self.settings["tokenizer"]))
        template = self.settings["data"]["chat_template"]
        return {**{place: _model_folder(place) for place in folders}, template: [Path(template)]}

    @property
    def settings_files(self) -> dict[str, SettingsFile]:
        manifest = find_manifest(self.name, [folder / "experts" for folder in self.folders])
        files = {f"experts/{manifest.name}": manifest, **self.hardware.files}
        if self.config["ablate"]:
            lists = ablation_files(self.config, self.folders)
            files |= {f"ablations/{path.name}": path for path in lists}
        return {
            key: SettingsFile(path=str(path), sha256=self.hashes.sha256(path))
            for key, path in files.items()
        }

    @property
    def own_artifacts(self) -> dict[str, str]:
        """The user's files that scoring reads, as the manifest names them, and their own task."""
        evaluation = self.settings["evaluation"]
        # source:file is a generator's, anything else a path.
        own = {key: place for key, place in evaluation["artifacts"].items() if ":" not in place}
        task = evaluation["task"]
        return {**own, OWN_TASK: str(Path(task))} if is_own_task(task) else own

    @property
    def artifacts(self) -> dict[str, str]:
        """The files that scoring reads; source:file is in a generated source's folder."""
        made = f"{self.results}/sources/generated"
        named = self.settings["evaluation"]["artifacts"].items()
        found = {key: f"{made}/{place.replace(':', '/')}" for key, place in named}
        for key, place in self.own_artifacts.items():
            # If the manifest now names another file, that one counts.
            brought = self.bundle is not None and self.bundle.own_artifacts.get(key) == place
            found[key] = artifact_path(self.name, key, place) if brought else place
        return found

    @cached_property
    def training(self) -> TrainingSection:
        """The training settings; null stands for auto."""
        section = without_auto(self.settings["training"])
        return from_json(TrainingSection, section, where="training")

    @property
    def tuning_files(self) -> list[str]:
        """The tuning file that the manifest names, if any: the user's, or one made here.

        An opened bundle's copy wins unless the manifest now names another one. Raises ConfigError
        if there is no such file and no rule makes it.
        """
        place = self.training.tuned
        if place is None:
            return []
        # The manifest's path belongs to the machine where the bundle was made.
        if self.bundle is not None and self.bundle.tuned == place:
            return [tuning_path(self.name)]
        path = Path(place).expanduser()
        if not TUNING_MADE.fullmatch(str(path)) and not path.is_file():
            raise ConfigError(
                f"expert {self.name}: training.tuned names {place}, which does not exist; correct"
                f" the path, or use {self.results}/tuning.json, which is made if it is missing"
            )
        return [str(path)]

    def hash_content(self, named: dict[str, list[Path]]) -> dict[str, str]:
        """Hash the user's own files, so that a changed one counts and a touched one does not.

        ``named`` are files by their names in the manifest, which the hashes go by: the location of
        a home directory is not a setting. If none of them is here, or if they are the same model,
        the hashes in an opened bundle count.
        """
        found: dict[str, str] = {}
        for place, files in named.items():
            paths = {str(file): file.expanduser() for file in files}
            here = {key: self.hashes.sha256(file) for key, file in paths.items() if file.is_file()}
            bundled = {} if self.bundle is None else self.bundle.content.get(place, {})
            found |= bundled if not here or _is_same_model(here, bundled) else here
        if self.run.main:
            self.hashes.save()
        return found


def source_specs(settings: Settings) -> tuple[SourceSpec, ...]:
    return tuple(from_json(SourceSpec, source, where="sources") for source in settings["sources"])


def _model_folder(place: str) -> list[Path]:
    # By the folder's name as written: ~ stays ~, so that no setting contains a home directory.
    folder = Path(place).expanduser()
    if not folder.is_dir():
        return []
    from expertflow.train.model.base import list_model_files

    return [Path(place) / file.relative_to(folder) for file in list_model_files(folder)]


def _is_same_model(here: dict[str, str], bundled: dict[str, str]) -> bool:
    # A folder of weights alone is enough here: the other files came with the bundle.
    decisive = [
        {key: sha256 for key, sha256 in files.items() if key.endswith(DECISIVE)}
        for files in (here, bundled)
    ]
    return bool(decisive[0]) and decisive[0] == decisive[1]
