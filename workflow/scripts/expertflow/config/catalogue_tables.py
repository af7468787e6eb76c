"""Print the catalogue of data sets as tables that fit a terminal of 80 columns, or as JSON."""

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from expertflow.config.catalogue import (
    CachedDataset,
    CacheReport,
    Catalogue,
    NamedSource,
    catalogue,
)
from expertflow.core.records import to_json

NO_LICENCE = "[bold red]no licence[/]"
UNKNOWN = "-"


def show(preset: str, *, as_json: bool, basedir: Path) -> None:
    """Print the data of the configured experts and of the caches to stdout."""
    found = catalogue(preset, basedir=basedir)
    if as_json:
        print(json.dumps(to_json(found), indent=2, ensure_ascii=False, default=str))
    else:
        print_catalogue(found, Console())


def print_catalogue(found: Catalogue, console: Console) -> None:
    """Print both tables, the caches' places, and what could not be read."""
    _print_cache(found.cache, console)
    console.print()
    console.print(_source_table(found.sources))
    unlicensed = sum(source.licence is None for source in found.sources)
    if unlicensed:
        console.print(
            f"[bold red]{unlicensed}[/] of {len(found.sources)} sources state no licence: name it"
            " in the manifest, or leave the source out"
        )
    for problem in found.problems:
        console.print(f"[bold red]not read:[/] {escape(problem)}", soft_wrap=True)


def _print_cache(cache: CacheReport, console: Console) -> None:
    for what, place in (("downloaded", cache.hub_cache), ("prepared", cache.prepared_cache)):
        said = "" if Path(place).is_dir() else " (there is no such folder yet)"
        console.print(f"{what}: {escape(place)}{said}", soft_wrap=True)
    if cache.datasets:
        console.print(_cache_table(cache.datasets))
    else:
        console.print("no data set in the Hugging Face caches")
    for damage in cache.damaged:
        console.print(f"[yellow]damaged:[/] {escape(damage)}", soft_wrap=True)


def _cache_table(datasets: tuple[CachedDataset, ...]) -> Table:
    table = _table("In the Hugging Face caches", ("data set", "size", "prepared"))
    for row in datasets:
        prepared = [f"{p.config} {sum(p.n_records_by_split.values()):,}" for p in row.prepared]
        table.add_row(
            "\n".join([f"[bold]{escape(row.id)}[/]", *(commit[:8] for commit in row.commits)]),
            size(row.n_bytes),
            escape("\n".join(prepared)) or "no",
        )
    return table


def _source_table(sources: tuple[NamedSource, ...]) -> Table:
    table = _table("Named by the experts", ("source", "here", "size", "records", "licence"))
    for row in sources:
        chosen = [row.kind, *(part for part in (row.config, row.split, row.revision) if part)]
        chosen += [f"{key}={value}" for key, value in row.options.items()]
        users = [f"{use.expert} ({', '.join(use.presets)})" for use in row.used_by]
        licence = escape(row.licence) if row.licence else NO_LICENCE
        table.add_row(
            f"[bold]{escape(row.location)}[/]\n"
            f"  {escape(' '.join(chosen))}\n"
            f"  for {escape(', '.join(users))}",
            "[bold red]missing[/]" if row.status == "missing" else row.status,
            size(row.n_bytes),
            UNKNOWN if row.n_records is None else f"{row.n_records:,}",
            f"{licence}\n(card)" if row.licence_origin == "card" else licence,
        )
    return table


def size(n_bytes: int | None) -> str:
    """Write a size in three digits.

    >>> size(1_234_567)
    '1.23 MB'
    """
    if n_bytes is None:
        return UNKNOWN
    value, units = float(n_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def _table(title: str, headers: tuple[str, ...]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for header in headers:
        numeric = header in ("size", "records")
        # Names fold at the terminal's edge rather than end in dots: they are there to be copied.
        table.add_column(
            header,
            overflow="fold",
            no_wrap=numeric or header == "here",
            justify="right" if numeric else "left",
        )
    return table
