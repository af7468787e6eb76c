"""Helpers that read a report and its pages."""

import html
import os
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from expertflow.core.records import from_json
from expertflow.report.compare import index_row, render_index
from expertflow.report.diagnose import MISSING, list_findings
from expertflow.report.measured import restore, to_plain
from expertflow.report.records import Finding, Report

GOLDEN = Path(__file__).parent / "golden"
MAX_PAGE_BYTES = 400_000
HOSTILE = "<script>alert(1)</script>\" onload='x' {{ 7 * 7 }} </style></svg></pre> \u202e \x1b[2J"
VOID = {"meta", "br", "path", "line", "rect", "circle", "stop"}


def findings_by_code(report: Report) -> dict[str, Finding]:
    return {finding.code: finding for finding in list_findings(report)}


class Outline(HTMLParser):
    """Collects tags and attributes, and checks that tags are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def check_page_is_safe(page: str) -> None:
    """Fail if a page runs a script, loads anything, or is not well formed."""
    outline = Outline(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert not re.findall(r"(?:href|src|url\()\s*=?\s*[\"']?(?:https?:)?//", page)


def section(page: str, name: str) -> str:
    return page.split(f'<section id="{name}"')[1].split("</section>")[0]


def compare_with_golden(name: str, text: str) -> None:
    """Compare with a file; to accept a change: EXPERTFLOW_UPDATE_GOLDEN=1 pytest."""
    path = GOLDEN / name
    if os.environ.get("EXPERTFLOW_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def lines_of(page: str) -> str:
    """Return all text on a page, one line each: texts, names of drawings and reasons on hover."""
    for pattern, told in (
        (r'<svg[^>]*role="img" aria-label="([^"]*)".*?</svg>', r"<p>[\1]</p>"),
        (r'<[^>]* title="([^"]*)"[^>]*>', r"<p>(\1) "),
        (r'<i class="key (\w+)">', r"{\1} "),
        (r'<section id="(\w+)"[^>]*>', r"<p>== \1</p>"),
        (r"<style>.*?</style>", ""),
    ):
        page = re.sub(pattern, told, page, flags=re.DOTALL)
    blocks = r"</?(?:p|h\d|tr|div|section|figure|summary|li|pre|caption|title)\b[^>]*>"
    parts = (html.unescape(re.sub(r"<[^>]+>", " ", part)) for part in re.split(blocks, page))
    return "\n".join(filter(None, (" ".join(part.split()) for part in parts))) + "\n"


def text_of(page: str) -> str:
    plain = re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]+>", " ", page, flags=re.DOTALL)
    return " ".join(plain.replace("\u00a0", " ").split())


def hostile(value: Any, kept: set[str], maps: set[str], key: str = "") -> Any:
    """Replace every text of a plain record except those of some keys, and the keys of some maps."""
    if isinstance(value, str):
        return value if key in kept else HOSTILE
    if isinstance(value, dict):
        return {
            HOSTILE if key in maps else k: hostile(item, kept, maps, k) for k, item in value.items()
        }
    if isinstance(value, list):
        return [hostile(item, kept, maps, key) for item in value]
    return value


def index_page(*reports: Report) -> str:
    """Return the page that compares experts, as in results/."""
    rows = [index_row(report) for report in reports]
    return render_index(rows, [f"{row['expert']}/report.html" for row in rows])


def changed(report: Report, changes: Mapping[str, Any]) -> Report:
    """Set values of report.json by their paths, as ``changes.1.n``; MISSING removes a key."""
    plain, nulls = to_plain(report)
    for path, value in changes.items():
        *way, last = (int(key) if key.isdigit() else key for key in path.split("."))
        holder: Any = plain
        for key in way:
            holder = holder[key]
        if value is MISSING:
            del holder[last]
        else:
            holder[last] = value
    found = from_json(Report, plain, where="report.json")
    restored: Report = restore(found, {path: why for path, why in nulls.items() if why})
    return restored
