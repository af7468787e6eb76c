"""The data on this machine: contents of the Hugging Face caches, and experts' sources.

``find_datasets.py`` prints it and loads this module by name, so that no rule depends on its code.
"""

import json
from pathlib import Path

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
from expertflow.core.records import to_json
from expertflow.data import cache
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.registry import open_source

NO_LICENSE, UNKNOWN = "[bold red]no license[/]", "-"


def build_catalog() -> Settings:
    """Scan the caches and all configured experts.

    Return ``cache``, ``sources`` (those that experts name) and ``problems`` (why manifests could
    not be read), as ``--json`` prints them.
    """
    path = next((p for folder in FOLDERS if (p := folder / "config.yaml").is_file()), None)
    if path is None:
        raise ConfigError(f"{BASEDIR}/config/config.yaml: missing; run in a copy of the project")
    config = read_yaml(path)
    uses: dict[str, tuple[SourceSpec, dict[str, list[str]]]] = {}
    problems: dict[str, None] = {}
    # A demo block may name other sources: each preset is loaded as a run would load it.
    for preset in ("demo", "full"):
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
                what = (spec.kind, _location(spec), spec.revision, spec.config, spec.split)
                more = (spec.seed, spec.n_documents, spec.options, spec.license)
                _, users = uses.setdefault(canonical_json([*what, *more]), (spec, {}))
                users.setdefault(name, []).append(preset)
    return {
        "cache": scan_caches(),
        "sources": [_describe_source(spec, users) for spec, users in uses.values()],
        "problems": list(problems),
    }


def scan_caches() -> Settings:
    """List the data sets in both Hugging Face caches, and unreadable folders with reasons."""
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
    prepared: dict[str, list[cache.Prepared]] = {}
    for root in sorted(path for path in arrow.glob("*") if path.is_dir()):
        # Without its downloaded files, a data set's id follows from the folder alone.
        if found_here := cache.list_prepared(root):
            prepared[roots.get(root, root.name.replace("___", "/"))] = found_here
    datasets = []
    for name in sorted({*repositories, *prepared}):
        repository, configs = repositories.get(name), prepared.get(name, [])
        revisions = repository.revisions if repository else ()
        # Each blob of the downloads counts once.
        n_downloaded = repository.size_on_disk if repository else 0
        datasets.append(
            {
                "id": name,
                "commits": sorted(revision.commit_hash for revision in revisions),
                "n_bytes": n_downloaded + sum(p.n_bytes for p in configs),
                "prepared": [to_json(p) for p in configs],
            }
        )
    return {
        "hub_cache": str(hub),
        "prepared_cache": str(arrow),
        "datasets": datasets,
        "damaged": damaged,
    }


def _location(spec: SourceSpec) -> str:
    return str(spec.id or spec.generator or spec.path)


def _describe_source(spec: SourceSpec, users: dict[str, list[str]]) -> Settings:
    """Describe a source and whether its records are here; an unstated license is null."""
    source = open_source(spec)
    found = source.look_up()
    return {
        "kind": spec.kind,
        "location": _location(spec),
        "revision": spec.revision,
        "config": spec.config,
        "split": spec.split if "split" in source.optional else None,
        **found._asdict(),
        "license": spec.license or found.license,
        "license_origin": "manifest" if spec.license else "card" if found.license else None,
        "used_by": [{"expert": name, "presets": presets} for name, presets in users.items()],
    }


def show_catalog(*, as_json: bool) -> None:
    found, console = build_catalog(), Console()
    if as_json:
        # Not the console, which breaks lines at the terminal's edge.
        print(json.dumps(found, indent=2, ensure_ascii=False, default=str))
        return
    caches, sources = found["cache"], found["sources"]
    for what, key in (("downloaded", "hub_cache"), ("prepared", "prepared_cache")):
        place = caches[key]
        missing = "" if Path(place).is_dir() else " (does not exist yet)"
        console.print(f"{what}: {escape(place)}{missing}", soft_wrap=True)
    empty = "no data set in the Hugging Face caches"
    console.print(_cache_table(caches["datasets"]) if caches["datasets"] else empty)
    for damage in caches["damaged"]:
        console.print(f"[yellow]damaged:[/] {escape(damage)}", soft_wrap=True)
    console.print()
    console.print(_source_table(sources))
    unlicensed = sum(source["license"] is None for source in sources)
    if unlicensed:
        console.print(
            f"[bold red]{unlicensed}[/] of {len(sources)} sources state no license: add it"
            " to the manifest, or remove the source"
        )
    for problem in found["problems"]:
        console.print(f"[bold red]not read:[/] {escape(problem)}", soft_wrap=True)


def _cache_table(datasets: list[Settings]) -> Table:
    table = _table("In the Hugging Face caches", ("data set", "size", "prepared"))
    for row in datasets:
        prepared = [
            f"{p['config']} {sum(p['n_records_by_split'].values()):,}" for p in row["prepared"]
        ]
        commits = (commit[:8] for commit in row["commits"])
        table.add_row(
            "\n".join([f"[bold]{escape(row['id'])}[/]", *commits]),
            decimal(row["n_bytes"]),
            escape("\n".join(prepared)) or "no",
        )
    return table


def _source_table(sources: list[Settings]) -> Table:
    table = _table("Named by the experts", ("source", "here", "size", "records", "license"))
    for row in sources:
        chosen = [row["kind"], *filter(None, (row["config"], row["split"], row["revision"]))]
        users = [f"{use['expert']} ({', '.join(use['presets'])})" for use in row["used_by"]]
        license = escape(row["license"]) if row["license"] else NO_LICENSE
        table.add_row(
            f"[bold]{escape(row['location'])}[/]\n"
            f"  {escape(' '.join(chosen))}\n"
            f"  for {escape(', '.join(users))}",
            "[bold red]missing[/]" if row["status"] == "missing" else row["status"],
            UNKNOWN if row["n_bytes"] is None else decimal(row["n_bytes"]),
            UNKNOWN if row["n_records"] is None else f"{row['n_records']:,}",
            f"{license}\n(card)" if row["license_origin"] == "card" else license,
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
