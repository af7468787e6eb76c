"""Which data there is on this machine: what the Hugging Face caches hold, and what experts name.

``find_datasets.py`` prints it when it is called alone, and loads this module by name: as part of
the workflow it does without, and a change here makes no rule run again.
"""

from pathlib import Path
from typing import Any, Literal

from expertflow.config.load import SUFFIXES, Schemas, load_config, load_expert
from expertflow.config.read_yaml import read_yaml
from expertflow.config.specs import source_specs
from expertflow.core.errors import ConfigError
from expertflow.core.files import canonical_json
from expertflow.core.records import Record
from expertflow.data import cache
from expertflow.data.fetch import kind_of
from expertflow.data.settings import SourceKind, SourceSpec

Preset = Literal["demo", "full"]
PRESETS: dict[str, tuple[Preset, ...]] = {
    "demo": ("demo",),
    "full": ("full",),
    "both": ("demo", "full"),
}


class Use(Record, frozen=True, kw_only=True):
    """An expert that reads a source, and in which presets."""

    expert: str
    presets: tuple[Preset, ...]


class NamedSource(Record, frozen=True, kw_only=True):
    """A source that experts name.

    ``location`` is a hub id, a path or a generator; ``status`` whether its records are here;
    ``options`` are those that choose among a data set's files.
    ``licence_origin`` is null where no licence is stated anywhere.
    """

    kind: SourceKind
    location: str
    revision: str | None
    config: str | None
    split: str | None
    options: dict[str, Any]
    status: Literal["prepared", "downloaded", "found", "missing", "generated"]
    n_bytes: int | None
    n_records: int | None
    licence: str | None
    licence_origin: Literal["manifest", "card"] | None
    used_by: tuple[Use, ...]


class CachedDataset(Record, frozen=True, kw_only=True):
    """A data set of the caches; ``n_bytes`` counts downloads, each blob once, and Arrow files."""

    id: str
    commits: tuple[str, ...]
    n_bytes: int
    prepared: tuple[cache.Prepared, ...]


class CacheReport(Record, frozen=True, kw_only=True):
    """Both Hugging Face caches; ``damaged`` are folders that could not be read, with the reason."""

    hub_cache: str
    prepared_cache: str
    datasets: tuple[CachedDataset, ...]
    damaged: tuple[str, ...]


class Catalogue(Record, frozen=True, kw_only=True):
    """Both tables, and the manifests that could not be read."""

    cache: CacheReport
    sources: tuple[NamedSource, ...]
    problems: tuple[str, ...]


def catalogue(preset: str, *, basedir: Path) -> Catalogue:
    """Look through the caches and through all configured experts.

    A ``config/`` of the working directory wins over the one of ``basedir``, as in a run.
    """
    uses, problems = _uses(PRESETS[preset], basedir)
    return Catalogue(
        cache=scan_caches(),
        sources=tuple(_named(spec, names) for spec, names in uses),
        problems=problems,
    )


def scan_caches() -> CacheReport:
    """List the data sets of both caches, sorted by id."""
    hub, arrow = cache.hub_cache(), cache.prepared_cache()
    sizes: dict[str, int] = {}
    commits: dict[str, tuple[str, ...]] = {}
    damaged: list[str] = []
    if hub.is_dir():
        from huggingface_hub import scan_cache_dir

        found = scan_cache_dir(hub)
        damaged = sorted(text for text in map(str, found.warnings) if "datasets--" in text)
        for repository in found.repos:
            if repository.repo_type == "dataset":
                sizes[repository.repo_id] = repository.size_on_disk
                commits[repository.repo_id] = tuple(
                    sorted(revision.commit_hash for revision in repository.revisions)
                )
    roots = {cache.prepared_root(name): name for name in sizes}
    prepared: dict[str, tuple[cache.Prepared, ...]] = {}
    for root in sorted(path for path in arrow.glob("*") if path.is_dir()):
        # Without its downloaded files, a data set's id follows from the folder alone.
        if configs := cache.list_prepared(root):
            prepared[roots.get(root, root.name.replace("___", "/"))] = tuple(configs)
    datasets = (
        CachedDataset(
            id=name,
            commits=commits.get(name, ()),
            n_bytes=sizes.get(name, 0) + sum(p.n_bytes for p in prepared.get(name, ())),
            prepared=prepared.get(name, ()),
        )
        for name in sorted({*sizes, *prepared})
    )
    return CacheReport(
        hub_cache=str(hub),
        prepared_cache=str(arrow),
        datasets=tuple(datasets),
        damaged=tuple(damaged),
    )


def _uses(
    presets: tuple[Preset, ...], basedir: Path
) -> tuple[list[tuple[SourceSpec, tuple[Use, ...]]], tuple[str, ...]]:
    """List the distinct sources with the experts that use them, in the order of the config."""
    schemas = Schemas.read(basedir / "workflow" / "schemas")
    directories = [Path("config"), basedir / "config"]
    path = next((p for d in directories if (p := d / "config.yaml").is_file()), None)
    if path is None:
        raise ConfigError(f"{basedir}/config/config.yaml: missing; run in a copy of the project")
    config = read_yaml(path)
    uses: dict[str, tuple[SourceSpec, dict[str, list[Preset]]]] = {}
    problems: dict[str, None] = {}
    for preset in presets:
        settings = load_config({**config, "preset": preset}, schemas)
        own = {path.stem for path in Path("config/experts").glob("*") if path.suffix in SUFFIXES}
        for name in dict.fromkeys([*settings["experts"], *sorted(own)]):
            try:
                expert = load_expert(
                    name,
                    directories=[d / "experts" for d in directories],
                    config=settings,
                    schemas=schemas,
                )
            except ConfigError as error:
                problems[str(error)] = None
                continue
            for spec in source_specs(expert):
                _, users = uses.setdefault(_identity(spec), (spec, {}))
                users.setdefault(name, []).append(preset)
    found = [
        (spec, tuple(Use(expert=name, presets=tuple(where)) for name, where in users.items()))
        for spec, users in uses.values()
    ]
    return found, tuple(problems)


def _identity(spec: SourceSpec) -> str:
    """Tell sources apart by the records they give, and by the licence that is claimed for them."""
    what = (
        spec.kind,
        kind_of(spec).location(spec),
        spec.revision,
        spec.config,
        spec.split,
        spec.seed,
    )
    return canonical_json([*what, spec.n_documents, spec.options, spec.licence])


def _named(spec: SourceSpec, used_by: tuple[Use, ...]) -> NamedSource:
    found = kind_of(spec).look_up(spec)
    card = None
    if spec.kind == "hub":
        commit = cache.cached_revision(str(spec.id), spec.revision)
        card = cache.card_licence(cache.card_data(str(spec.id), commit))
    return NamedSource(
        kind=spec.kind,
        location=kind_of(spec).location(spec),
        revision=spec.revision,
        config=spec.config,
        split=spec.split if spec.kind == "hub" else None,
        options={key: spec.options[key] for key in cache.READ_OPTIONS if key in spec.options},
        status=found.status,
        n_bytes=found.n_bytes,
        n_records=found.n_records,
        licence=spec.licence or card,
        licence_origin="manifest" if spec.licence else "card" if card else None,
        used_by=used_by,
    )
