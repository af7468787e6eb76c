"""Options of ``guard_run.py`` for a job that trains from a bundle, one job for each expert."""

import shlex

from expertflow.core.errors import ConfigError


def guard_command(options: str, expert: str) -> str:
    """Give what to put before a command, each expert's copies in a folder of their own.

    Raises:
        ConfigError: this is no command line, or it would stop the machine before the outcome is
            packed.
    """
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise ConfigError(
            f"guard: {options!r} is no shell text ({error}); mend it, and let no quote end it, as"
            " Snakemake takes that off"
        ) from error
    if not words:
        return ""
    if any(word.startswith("--o") for word in words):
        raise ConfigError(
            "guard: --on-finish would stop the machine before the outcome is packed; leave it out,"
            " and let what started the job stop it"
        )
    for i, word in enumerate(words):
        name, given, place = word.partition("=")
        if given and _is_place(name):
            words[i] = f"{name}={_below(place, expert)}"
        elif i and _is_place(words[i - 1]):
            words[i] = _below(word, expert)
    return f'python "$EXPERTFLOW/guard_run.py" {shlex.join(words)} --'


def _is_place(name: str) -> bool:
    """Tell whether an option names where copies go, abbreviated perhaps.

    In one place for all experts, each job would take the others' copies for old ones.
    """
    return name in ("--push", "--sync-t", "--sync-to")


def _below(place: str, expert: str) -> str:
    return f"{place.rstrip('/')}/{expert}"
