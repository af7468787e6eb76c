"""What a git source is told: which commits to take, and how much of them."""

from collections.abc import Sequence
from datetime import UTC, datetime, time
from typing import Any, Literal

from expertflow.core.errors import ConfigError
from expertflow.data.formats.options import SourceOptions

# The endings of the files in which each language is written.
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

    Dates are UTC unless they say otherwise; a day stands for the complete day. Of ``max_files`` a
    renamed one counts twice.
    """

    kind = "git"
    ref: str = "HEAD"
    paths: Sequence[str] = ()
    languages: Sequence[str] = ()
    since: str | None = None
    until: str | None = None
    authors: Sequence[str] = ()
    merges: Literal["skip", "keep"] = "skip"
    max_diff_bytes: int = 8000
    max_files: int = 1000
    max_commits: int | None = None
    pseudonymise: bool = True

    def __post_init__(self) -> None:
        if self.merges not in ("skip", "keep"):
            raise ConfigError(f"options.merges: {self.merges!r} is neither 'skip' nor 'keep'")
        if not isinstance(self.pseudonymise, bool):
            raise ConfigError(f"options.pseudonymise: {self.pseudonymise!r} must be true or false")
        for key in ("paths", "languages", "authors"):
            value = getattr(self, key)
            if isinstance(value, str) or not all(isinstance(part, str) for part in value):
                raise ConfigError(f"options.{key}: {value!r} must be a list of texts")
        if unknown := [name for name in self.languages if name not in LANGUAGES]:
            known = ", ".join(LANGUAGES)
            raise ConfigError(f"options.languages: {unknown[0]!r} is unknown; known are {known}")
        if magic := [path for path in self.paths if self.languages and path.startswith(":")]:
            raise ConfigError(
                f"options.paths: {magic[0]!r} begins with ':', which does not go with languages"
            )
        for key in ("max_diff_bytes", "max_files", "max_commits"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"options.{key}: {value!r} must be a whole number of at least 1")
        self.takes_date(None)  # refuses what is no date

    def takes_date(self, when: datetime | None) -> bool:
        """Return whether an author's date is selected; an unknown one only when any date is."""
        since = _moment(self.since, "since", time.min)
        until = _moment(self.until, "until", time.max)
        if when is None:
            return since is None and until is None
        return (since is None or when >= since) and (until is None or when <= until)

    def endings(self) -> tuple[str, ...]:
        return tuple(f".{ending}" for name in self.languages for ending in LANGUAGES[name])

    def pathspecs(self) -> tuple[str, ...]:
        """Return the pathspecs of the files that are in ``paths`` and in ``languages``.

        In a pathspec "*" also stands for "/": "src/*.py" are all Python files below src.
        """
        if not self.languages:
            return tuple(self.paths)
        wanted: dict[str, None] = {}
        for ending in self.endings():
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
        raise ConfigError(f"options.{key}: {text!r} is no date like 2025-01-31") from error
    if len(str(text)) == len("2025-01-31"):
        moment = datetime.combine(moment, of_day)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
