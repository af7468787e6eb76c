"""The pages in a real browser: wide and narrow, light and dark, printed, without JavaScript."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up_ablation import make_ablation
from made_up_runs import CPU, GPU
from msgspec.structs import replace
from report_reading import index_page

from expertflow.report.ablation_page import render_ablation
from expertflow.report.build import build_report
from expertflow.report.page import render_page

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: make test-long"
)
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
    pytest.mark.long,
]

# In containers /dev/shm is often too small for a page.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
PATIENCE_MS = 180_000
SIZES = {"desktop": 900, "phone": 390}
PAGES = ("gpu", "cpu", "index", "ablated", "ablation")

# Elements wider than the page. Tables may scroll inside their own box.
TOO_WIDE = """() => [...document.querySelectorAll('body *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll, caption'))
  .map(e => e.tagName + '.' + e.className)"""
# Texts of a drawing that overlap or are cut off.
COLLISIONS = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  if (!frame.width) return [];
  const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent)
    .map(t => ({text: t.textContent, box: t.getBoundingClientRect()}));
  const cut = texts.filter(({box}) => box.left < frame.left - 1 || box.right > frame.right + 1
    || box.top < frame.top - 2 || box.bottom > frame.bottom + 2).map(t => 'cut off: ' + t.text);
  const on = texts.flatMap((a, i) => texts.slice(i + 1)
    .filter(b => a.box.left < b.box.right - 1 && b.box.left < a.box.right - 1
    && a.box.top < b.box.bottom - 2 && b.box.top < a.box.bottom - 2)
    .map(b => a.text + ' | ' + b.text));
  return cut.concat(on);
})"""
SMALLEST = """() => Math.min(...[...document.querySelectorAll('svg text')]
  .filter(t => t.getBoundingClientRect().height).map(t => {
    const svg = t.closest('svg');
    return parseFloat(getComputedStyle(t).fontSize)
      * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  }))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("pages")
    ablated = replace(GPU.short, ablation=make_ablation())
    pages = (
        GPU.page, CPU.page, index_page(GPU.report, CPU.report),
        render_page(build_report(ablated, {}), ablated), render_ablation(make_ablation()),
    )  # fmt: skip
    for name, page in zip(PAGES, pages, strict=True):
        (target / f"{name}.html").write_text(page, encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # A separate home: some users have no writable one.
        home = str(tmp_path_factory.mktemp("home"))
        places = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), home)
        try:
            found = playwright.chromium.launch(
                executable_path=CHROMIUM, args=FLAGS, env={**os.environ, **places},
                timeout=PATIENCE_MS,
            )  # fmt: skip
        except sync_api.Error as error:
            pytest.skip(f"chromium does not start here: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def show(browser: Any, folder: Path) -> Iterator[Any]:
    """Open a page; at the end it must have made no requests and logged no errors."""
    strays: list[str] = []
    contexts = []

    def opened(name: str, *, width: int = 900, scheme: str = "light") -> Any:
        place = (folder / f"{name}.html").as_uri()
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme,
            java_script_enabled=False,
        )  # fmt: skip
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)

        def guard(route: Any) -> None:
            if route.request.url == place:
                route.continue_()
            else:
                strays.append(route.request.url)
                route.abort()

        context.route("**/*", guard)
        page = context.new_page()
        page.on("console", lambda message: strays.append(message.text))
        page.on("pageerror", lambda error: strays.append(str(error)))
        page.goto(place)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert strays == []


BACKGROUND = "() => getComputedStyle(document.body).backgroundColor"


# Texts with a contrast below 4.5 : 1 to their background.
FAINT = """() => {
  const light = color => { const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3)
    .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { const color = getComputedStyle(e).backgroundColor;
    return /, 0\\)$/.test(color) && e.parentElement ? behind(e.parentElement) : color; };
  return [...document.querySelectorAll('body *')]
    .filter(e => !e.closest('svg') && e.getBoundingClientRect().height
      && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .map(e => [e, light(getComputedStyle(e).color), light(behind(e))])
    .filter(([e, a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5)
    .map(([e]) => e.tagName + '.' + e.className + ' ' + getComputedStyle(e).color); }"""


# Each page in both sizes and both colors, without opening it four times.
@pytest.mark.parametrize(("size", "scheme"), [("desktop", "light"), ("phone", "dark")])
@pytest.mark.parametrize("name", PAGES)
def test_everything_is_legible_and_nothing_overflows(
    show: Any, name: str, size: str, scheme: str
) -> None:
    page = show(name, width=SIZES[size], scheme=scheme)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= SIZES[size], page.evaluate(TOO_WIDE)
    for unwanted in (TOO_WIDE, COLLISIONS, FAINT):
        assert page.evaluate(unwanted) == []
    if name != "index":
        assert page.evaluate(SMALLEST) >= 10.5
    light = sum(_channels(page.evaluate(BACKGROUND)))
    assert light > 3 * 230 if scheme == "light" else light < 3 * 50


def _channels(color: str) -> list[int]:
    return [int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")]


def test_it_prints_on_white_with_complete_charts(show: Any) -> None:
    page = show("gpu", scheme="dark")
    page.emulate_media(media="print")
    assert _channels(page.evaluate(BACKGROUND)) == [255, 255, 255]
    broken = "() => getComputedStyle(document.querySelector('figure')).breakInside"
    assert page.evaluate(broken) == "avoid"
    printed = page.pdf(format="A4", print_background=True)
    assert printed.startswith(b"%PDF") and len(printed) > 20_000
