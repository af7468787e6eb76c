"""What each rule is told: the settings that it uses, for one expert and one job."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.config import rule_code, specs
from expertflow.config.ablations import ablation_files, ablation_spec, variant_spec
from expertflow.config.load import find_manifest
from expertflow.config.opened import Case, decided, told_training
from expertflow.config.tuning import tuning_spec
from expertflow.core.files import canonical_json
from expertflow.core.records import to_json
from expertflow.data.lock import HashCache
from expertflow.data.settings import SourceSpec
from expertflow.rental.bundle.records import BundleSpec, SettingsFile, own_artefact
from expertflow.studies.records import AblationSpec
from expertflow.tokens.records import TokenSpec

# Files by which a model is known.
DECISIVE = (".safetensors", "/tokenizer.json")


class RuleSpecs:
    """The spec of every rule. ``case`` and ``expert`` give an expert's settings by its name.

    The method behind a rule has the rule's name, with an underscore before it.
    """

    def __init__(
        self,
        *,
        case: Callable[[str], Case],
        expert: Callable[[str], dict[str, Any]],
        scripts: Path,
        hashes: HashCache,
        main: bool,
    ) -> None:
        self._case = case
        self._expert = expert
        self._scripts = scripts
        self._hashes = hashes
        self._main = main
        self._ablations: dict[str, AblationSpec] = {}

    def text(self, rule: str, wildcards: Any) -> str:
        """Give a rule's settings as canonical JSON; this is what Snakemake compares."""
        build = getattr(self, f"_{rule}")
        return canonical_json(to_json(build(wildcards.expert, wildcards)))

    def _source(self, name: str, source: str) -> SourceSpec:
        return next(s for s in specs.source_specs(self._expert(name)) if s.name == source)

    def _fetch_source(self, name: str, wildcards: Any) -> Any:
        source = self._source(name, wildcards.source)
        return specs.fetch_spec(source, preset=self._case(name).config["preset"])

    _generate_source = _fetch_source

    def _find_datasets(self, name: str, _: Any) -> Any:
        licences = {source["name"]: source["licence"] for source in self._expert(name)["sources"]}
        preset = self._case(name).config["preset"]
        return {"expert": name, "preset": preset, "licences": licences}

    def _prepare_shard(self, name: str, wildcards: Any) -> Any:
        source = self._source(name, wildcards.source)
        content = self._content(name, self._benchmarks(name))
        return specs.prepare_spec(self._expert(name), source, content)

    def _deduplicate_documents(self, name: str, _: Any) -> Any:
        return specs.deduplicate_spec(self._expert(name))

    def _prepare_model(self, name: str, _: Any) -> Any:
        content = self._content(name, self._model_files(name))
        return specs.model_spec(self._expert(name), content)

    def _pretokenize_shard(self, name: str, _: Any) -> TokenSpec:
        own = specs.token_spec(self._expert(name))
        made = self._case(name).spec
        # Tokens that came with a bundle are no worse for the engines that are installed here.
        return own if made is None else replace(own, versions=made.tokens.versions)

    def _pack_sequences(self, name: str, _: Any) -> Any:
        return specs.packing_spec(self._expert(name))

    def _plan_training(self, name: str, _: Any) -> Any:
        return self._case(name).hardware.plan_spec(self._expert(name))

    def _calibrate_expert(self, name: str, _: Any) -> Any:
        return self._case(name).hardware.calibration_spec(self._expert(name))

    def _tune_expert(self, name: str, _: Any) -> Any:
        return tuning_spec(self._case(name).hardware.plan_spec(self._expert(name)))

    def ablation(self, name: str) -> AblationSpec:
        """Give the variants and claims of an expert, read once."""
        if name not in self._ablations:
            case = self._case(name)
            schemas = self._scripts.parent / "schemas"
            self._ablations[name] = ablation_spec(case.config, case.directories, schemas)
        return self._ablations[name]

    def _ablate_variant(self, name: str, wildcards: Any) -> Any:
        return variant_spec(self.ablation(name), wildcards.variant)

    def _ablate_expert(self, name: str, _: Any) -> Any:
        return self.ablation(name)

    def _stage_to_nvme(self, name: str, _: Any) -> Any:
        return specs.stage_spec(self._case(name).config)

    def _train_expert(self, name: str, _: Any) -> Any:
        return {"expert": name}

    def _evaluate_expert(self, name: str, _: Any) -> Any:
        artefacts = self._artefacts(name)
        own = {place: [Path(place)] for place in artefacts.values() if ":" not in place}
        content = self._content(name, own)
        return specs.evaluation_spec(self._expert(name), artefacts, content)

    def _export_model(self, name: str, _: Any) -> Any:
        return specs.export_spec(name, self._expert(name))

    def _build_report(self, name: str, _: Any) -> Any:
        return specs.report_spec(name, self._expert(name), self._case(name).config)

    def _make_bundle(self, name: str, _: Any) -> Any:
        config = self._case(name).config
        sources = self._expert(name)["sources"]
        generators = sorted({s["generator"] for s in sources if s["kind"] == "generated"})
        named = {**self._benchmarks(name), **self._model_files(name)}
        content = {place: self._content(name, {place: files}) for place, files in named.items()}
        return BundleSpec(
            expert=name,
            config=decided(config, name),
            files=self._settings_files(name),
            content={place: found for place, found in content.items() if found},
            artefacts=self._artefacts(name),
            own_artefacts=self._own_artefacts(name),
            tokens=self._pretokenize_shard(name, None),
            code=rule_code.chain_digests(generators, self._scripts),
            with_weights=config["bundle_weights"],
            tuned=self._expert(name)["training"]["tuned"],
            staging=specs.stage_spec(config),
            told=told_training(self._case(name).told, name),
        )

    def benchmarks(self, name: str) -> list[str]:
        """List the benchmark files that must not be trained on; a bundle makes do without them."""
        return [] if self._case(name).bundle else list(self._benchmarks(name))

    def artefacts(self, name: str) -> list[str]:
        """List what scoring reads besides documents: a user's file, or a generator's folder."""
        made = f"results/{name}/sources/generated"
        own = self._own_artefacts(name)
        return [
            self._artefacts(name)[key] if key in own else f"{made}/{place.split(':')[0]}"
            for key, place in self._expert(name)["evaluation"]["artefacts"].items()
        ]

    def _own_artefacts(self, name: str) -> dict[str, str]:
        """Give those files of the user's, as the manifest names them."""
        places = self._expert(name)["evaluation"]["artefacts"].items()
        return {key: place for key, place in places if ":" not in place}

    def _artefacts(self, name: str) -> dict[str, str]:
        """Give the files that scoring reads; source:file lies in a generated source's folder."""
        made = f"results/{name}/sources/generated"
        found = {
            key: f"{made}/{place.replace(':', '/')}"
            for key, place in self._expert(name)["evaluation"]["artefacts"].items()
        }
        bundle = self._case(name).spec
        for key, place in self._own_artefacts(name).items():
            brought = bundle is not None and bundle.own_artefacts.get(key) == place
            found[key] = own_artefact(name, key, place) if brought else place
        return found

    def _benchmarks(self, name: str) -> dict[str, list[Path]]:
        named = [benchmark["path"] for benchmark in self._expert(name)["data"]["benchmarks"]]
        return {path: [Path(path)] for path in named}

    def _model_files(self, name: str) -> dict[str, list[Path]]:
        """List the user's files that a base model is made from, by what the manifest calls them."""
        expert = self._expert(name)
        folders = filter(None, (expert["model"], expert["tokenizer"]))
        template = expert["data"]["chat_template"]
        return {**{place: _model_folder(place) for place in folders}, template: [Path(template)]}

    def _settings_files(self, name: str) -> dict[str, SettingsFile]:
        """Find the manifest and the tables behind an expert's settings."""
        case = self._case(name)
        manifest = find_manifest(name, [directory / "experts" for directory in case.directories])
        files = {f"experts/{manifest.name}": manifest, **case.hardware.files}
        if case.config["ablate"]:
            files |= ablation_files(case.config, case.directories)
        return {
            key: SettingsFile(path=str(path), sha256=self._hashes.sha256(path))
            for key, path in files.items()
        }

    def _content(self, name: str, named: dict[str, list[Path]]) -> dict[str, str]:
        """Hash the user's own files, so that a changed one counts and a touched one does not.

        ``named`` are files by what the manifest calls them, and go by the names they have there:
        where a home lies is no setting. Where none of them is here, or the same model, what a
        bundle that was opened says of them counts.
        """
        found: dict[str, str] = {}
        for place, files in named.items():
            there = {str(file): file.expanduser() for file in files}
            here = {key: self._hashes.sha256(file) for key, file in there.items() if file.is_file()}
            bundled = self._case(name).content.get(place, {})
            found |= bundled if not here or _is_same_model(here, bundled) else here
        if self._main:
            self._hashes.save()
        return found


def _model_folder(place: str) -> list[Path]:
    """List what is read of a model's folder, below the folder's name as it is written."""
    folder = Path(place).expanduser()
    if not folder.is_dir():
        return []
    from expertflow.train.model.base import wanted_files

    return [Path(place) / file.name for file in wanted_files(folder)]


def _is_same_model(here: dict[str, str], bundled: dict[str, str]) -> bool:
    """Tell whether two folders hold the same weights and tokenizer; the rest came bundled."""
    decisive = [
        {key: sha256 for key, sha256 in files.items() if key.endswith(DECISIVE)}
        for files in (here, bundled)
    ]
    return bool(decisive[0]) and decisive[0] == decisive[1]
