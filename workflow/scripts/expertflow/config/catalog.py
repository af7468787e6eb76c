"""The data on this machine: contents of the Hugging Face caches, and experts' sources.

``find_datasets.py`` prints it and loads this module by name, so that no rule depends on its code.
"""

import json
from pathlib import Path
from typing import Literal, get_args

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from expertflow.config.expert import source_specs
from expertflow.config.load import load_config, load_expert
from expertflow.config.read_yaml import Settings, read_yaml
from expertflow.config.validate import BASEDIR, FOLDERS, list_files
from expertflow.core.errors import ConfigError, list_faults
from expertflow.core.files import canonical_json
from expertflow.core.records import Record, fill_record, to_json
from expertflow.data import cache
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.registry import open_source

Preset = Literal["demo", "full"]
NO_LICENSE, UNKNOWN = "[bold red]no license[/]", "-"


class Use(Record, frozen=True, kw_only=True):
    expert: str
    presets: tuple[Preset, ...]


class NamedSource(Record, frozen=True, kw_only=True):
    """A source that experts name.

    ``location`` is a hub id, a path or a generator; ``status`` whether its records are here.
    ``license_origin`` is null where no license is stated anywhere.
    """

    kind: str
    location: str
    revision: str | None
    config: str | None
    split: str | None
    status: str
    n_bytes: int | None
    n_records: int | None
    license: str | None
    license_origin: Literal["manifest", "card"] | None
    used_by: tuple[Use, ...]


class CachedDataset(Record, frozen=True, kw_only=True):
    """A data set of the caches; ``n_bytes`` counts downloads, each blob once, and Arrow files."""

    id: str
    commits: tuple[str, ...]
    n_bytes: int
    prepared: tuple[cache.Prepared, ...]


class CacheReport(Record, frozen=True, kw_only=True):
    """Both Hugging Face caches; ``damaged`` lists unreadable folders with reasons."""

    hub_cache: str
    prepared_cache: str
    datasets: tuple[CachedDataset, ...]
    damaged: tuple[str, ...]


class Catalog(Record, frozen=True, kw_only=True):
    """Both tables, and the manifests that could not be read."""

    cache: CacheReport
    sources: tuple[NamedSource, ...]
    problems: tuple[str, ...]


def build_catalog() -> Catalog:
    """Scan the caches and all configured experts."""
    path = next((p for folder in FOLDERS if (p := folder / "config.yaml").is_file()), None)
    if path is None:
        raise ConfigError(f"{BASEDIR}/config/config.yaml: missing; run in a copy of the project")
    config = read_yaml(path)
    uses: dict[str, tuple[SourceSpec, dict[str, list[Preset]]]] = {}
    problems: dict[str, None] = {}
    # A demo block may name other sources: each preset is loaded as a run would load it.
    for preset in get_args(Preset):
        settings = load_config({**config, "preset": preset})
        own = list_files([Path("config/experts")])
        for name in dict.fromkeys([*settings["experts"], *sorted(own)]):
            folders = [folder / "experts" for folder in FOLDERS]
            try:
                expert = load_expert(name, folders=folders, config=settings)
            except ConfigError as error:
                # Both presets often fail with the same line; a dict keeps each once, in order.
                problems |= dict.fromkeys(list_faults(error))
                continue
            for spec in source_specs(expert):
                # Two experts with one source are one row.
                _, users = uses.setdefault(_identity(spec), (spec, {}))
                users.setdefault(name, []).append(preset)
    return Catalog(
        cache=scan_caches(),
        sources=tuple(_named(spec, users) for spec, users in uses.values()),
        problems=tuple(problems),
    )


def scan_caches() -> CacheReport:
    hub, arrow = cache.hub_cache(), cache.find_prepared_cache()
    repositories: Settings = {}
    damaged: list[str] = []
    if hub.is_dir():
        # Imported here: many machines have no such cache.
        from huggingface_hub import scan_cache_dir

        found = scan_cache_dir(hub)
        damaged = sorted(text for text in map(str, found.warnings) if "datasets--" in text)
        repositories = {repo.repo_id: repo for repo in found.repos if repo.repo_type == "dataset"}
    roots = {cache.find_prepared_root(name): name for name in repositories}
    prepared: dict[str, tuple[cache.Prepared, ...]] = {}
    for root in sorted(path for path in arrow.glob("*") if path.is_dir()):
        # Without its downloaded files, a data set's id follows from the folder alone.
        if found_here := cache.list_prepared(root):
            prepared[roots.get(root, root.name.replace("___", "/"))] = tuple(found_here)
    datasets = []
    for name in sorted({*repositories, *prepared}):
        repository, configs = repositories.get(name), prepared.get(name, ())
        revisions = () if repository is None else repository.revisions
        n_downloaded = 0 if repository is None else repository.size_on_disk
        row = CachedDataset(
            id=name,
            commits=tuple(sorted(revision.commit_hash for revision in revisions)),
            n_bytes=n_downloaded + sum(p.n_bytes for p in configs),
            prepared=configs,
        )
        datasets.append(row)
    return CacheReport(
        hub_cache=str(hub),
        prepared_cache=str(arrow),
        datasets=tuple(datasets),
        damaged=tuple(damaged),
    )


def _identity(spec: SourceSpec) -> str:
    what = (spec.kind, _location(spec), spec.revision, spec.config, spec.split, spec.seed)
    return canonical_json([*what, spec.n_documents, spec.options, spec.license])


def _location(spec: SourceSpec) -> str:
    return str(spec.id or spec.generator or spec.path)


def _named(spec: SourceSpec, users: dict[str, list[Preset]]) -> NamedSource:
    source = open_source(spec)
    found = source.look_up()._asdict()
    card = found.pop("license")
    return fill_record(
        NamedSource,
        spec,
        location=_location(spec),
        split=spec.split if "split" in source.optional else None,
        **found,
        license=spec.license or card,
        license_origin="manifest" if spec.license else "card" if card else None,
        used_by=tuple(Use(expert=name, presets=tuple(users[name])) for name in users),
    )


def show_catalog(*, as_json: bool) -> None:
    found, console = build_catalog(), Console()
    if as_json:
        # Not the console, which breaks lines at the terminal's edge.
        print(json.dumps(to_json(found), indent=2, ensure_ascii=False, default=str))
        return
    cache = found.cache
    for what, place in (("downloaded", cache.hub_cache), ("prepared", cache.prepared_cache)):
        missing = "" if Path(place).is_dir() else " (does not exist yet)"
        console.print(f"{what}: {escape(place)}{missing}", soft_wrap=True)
    empty = "no data set in the Hugging Face caches"
    console.print(_cache_table(cache.datasets) if cache.datasets else empty)
    for damage in cache.damaged:
        console.print(f"[yellow]damaged:[/] {escape(damage)}", soft_wrap=True)
    console.print()
    console.print(_source_table(found.sources))
    unlicensed = sum(source.license is None for source in found.sources)
    if unlicensed:
        console.print(
            f"[bold red]{unlicensed}[/] of {len(found.sources)} sources state no license: add it"
            " to the manifest, or remove the source"
        )
    for problem in found.problems:
        console.print(f"[bold red]not read:[/] {escape(problem)}", soft_wrap=True)


def _cache_table(datasets: tuple[CachedDataset, ...]) -> Table:
    table = _table("In the Hugging Face caches", ("data set", "size", "prepared"))
    for row in datasets:
        prepared = [f"{p.config} {sum(p.n_records_by_split.values()):,}" for p in row.prepared]
        table.add_row(
            "\n".join([f"[bold]{escape(row.id)}[/]", *(commit[:8] for commit in row.commits)]),
            decimal(row.n_bytes),
            escape("\n".join(prepared)) or "no",
        )
    return table


def _source_table(sources: tuple[NamedSource, ...]) -> Table:
    table = _table("Named by the experts", ("source", "here", "size", "records", "license"))
    for row in sources:
        chosen = [row.kind, *(part for part in (row.config, row.split, row.revision) if part)]
        users = [f"{use.expert} ({', '.join(use.presets)})" for use in row.used_by]
        license = escape(row.license) if row.license else NO_LICENSE
        table.add_row(
            f"[bold]{escape(row.location)}[/]\n"
            f"  {escape(' '.join(chosen))}\n"
            f"  for {escape(', '.join(users))}",
            "[bold red]missing[/]" if row.status == "missing" else row.status,
            UNKNOWN if row.n_bytes is None else decimal(row.n_bytes),
            UNKNOWN if row.n_records is None else f"{row.n_records:,}",
            f"{license}\n(card)" if row.license_origin == "card" else license,
        )
    return table


def _table(title: str, headers: tuple[str, ...]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for header in headers:
        numeric = header in ("size", "records")
        # Names wrap at the terminal's edge instead of ending in dots, so that they can be copied.
        table.add_column(
            header,
            overflow="fold",
            no_wrap=numeric or header == "here",
            justify="right" if numeric else "left",
        )
    return table
