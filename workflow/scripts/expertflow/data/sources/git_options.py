"""Options of a git source: which commits to take, and how much of them."""

from datetime import UTC, datetime, time
from typing import Annotated, Any, Literal

from msgspec import Meta

from expertflow.core.errors import ConfigError
from expertflow.data.settings import SourceOptions

AtLeastOne = Annotated[int, Meta(ge=1)]
# File extensions by language.
LANGUAGES = {
    "c": ("c", "h"),
    "cpp": ("cc", "cpp", "cxx", "hh", "hpp", "hxx", "h"),
    "csharp": ("cs",),
    "css": ("css", "less", "scss"),
    "cypher": ("cyp", "cypher"),
    "go": ("go",),
    "haskell": ("hs",),
    "html": ("htm", "html"),
    "java": ("java",),
    "javascript": ("cjs", "js", "jsx", "mjs"),
    "json": ("json", "jsonc", "jsonl"),
    "kotlin": ("kt", "kts"),
    "lua": ("lua",),
    "markdown": ("markdown", "md"),
    "perl": ("pl", "pm", "t"),
    "php": ("php",),
    "python": ("py", "pyi", "pyx"),
    "r": ("R", "r"),
    "ruby": ("rb",),
    "rust": ("rs",),
    "scala": ("scala",),
    "shell": ("bash", "sh", "zsh"),
    "sql": ("sql",),
    "swift": ("swift",),
    "toml": ("toml",),
    "typescript": ("cts", "mts", "ts", "tsx"),
    "yaml": ("yaml", "yml"),
}


class GitOptions(SourceOptions, frozen=True, kw_only=True):
    """Which commits to take, and how much of them; docs/data.md explains each option.

    Dates are UTC by default; a day means the complete day. A rename counts twice in ``max_files``.
    """

    ref: str = "HEAD"
    paths: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    since: Any = None
    until: Any = None
    authors: tuple[str, ...] = ()
    merges: Literal["skip", "keep"] = "skip"
    max_diff_bytes: AtLeastOne = 8000
    max_files: AtLeastOne = 1000
    pseudonymize: bool = True

    def __post_init__(self) -> None:
        if unknown := [name for name in self.languages if name not in LANGUAGES]:
            known = ", ".join(LANGUAGES)
            raise ConfigError(f"options.languages: {unknown[0]!r} is unknown; choose from {known}")
        if magic := [path for path in self.paths if self.languages and path.startswith(":")]:
            raise ConfigError(
                f"options.paths: {magic[0]!r} begins with ':', which cannot be combined with"
                " languages"
            )
        outside = [path for path in self.paths if path[:1] in ("", "/") or ".." in path.split("/")]
        if outside:
            raise ConfigError(
                f"options.paths: {outside[0]!r} is not a path inside the repository; write it as"
                " src/app"
            )
        self.takes_date(None)  # refuses an invalid date

    def takes_date(self, when: datetime | None) -> bool:
        """Return whether an author date is selected; an unknown one only without limits."""
        since = _moment(self.since, "since", time.min)
        until = _moment(self.until, "until", time.max)
        if when is None:
            return since is None and until is None
        return (since is None or when >= since) and (until is None or when <= until)

    @property
    def endings(self) -> tuple[str, ...]:
        return tuple(f".{ending}" for name in self.languages for ending in LANGUAGES[name])

    @property
    def pathspecs(self) -> tuple[str, ...]:
        """Return the wanted files' pathspecs, in which "*" also matches "/"."""
        if not self.languages:
            return self.paths
        wanted: dict[str, None] = {}
        for ending in self.endings:
            # "src" may be a file or a folder, "src/*" a pattern: src/*.py matches at any depth.
            for path in self.paths or ("*",):
                if path.endswith(ending):
                    wanted[path] = None
                if path.endswith("*"):
                    wanted[path + ending] = None
                wanted[path.rstrip("/") + "/*" + ending] = None
        return tuple(wanted)


def _moment(text: Any, key: str, of_day: time) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError as error:
        raise ConfigError(f"options.{key}: {text!r} is not a date like 2025-01-31") from error
    # A day alone has no time: the last day counts to its end.
    if len(str(text)) in (len("2025-01-31"), len("20250131")):
        moment = datetime.combine(moment, of_day)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
