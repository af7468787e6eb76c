"""The guard of jobs that train from bundles: several experts' jobs may share its options."""

import shlex

import pytest

from expertflow.core.errors import ConfigError
from expertflow.rental.guard.options import guard_command


def options(text: str) -> list[str]:
    """Give the options as a shell hands them to the guard of an expert."""
    words = shlex.split(guard_command(text, "an expert"))
    assert words[0] == "python" and words[-1] == "--"
    return words[2:-1]


def test_each_experts_copies_have_a_place_of_their_own() -> None:
    assert options("--push s3://b/c/ --push-minutes 5 --sync-to=/a/b --max-usd 2") == [
        *("--push", "s3://b/c/an expert", "--push-minutes", "5"),
        *("--sync-to=/a/b/an expert", "--max-usd", "2"),
    ]
    assert options("--sync-t 'a b' --push=c") == ["--sync-t", "a b/an expert", "--push=c/an expert"]
    assert guard_command("", "an expert") == ""


@pytest.mark.parametrize("text", ["--on-finish stop", "--push a --on-finish=stop", "--on-fin stop"])
def test_nothing_stops_the_machine_before_the_outcome_is_packed(text: str) -> None:
    with pytest.raises(ConfigError, match="--on-finish would stop the machine before the outcome"):
        guard_command(text, "e")


def test_an_open_quote_ends_in_one_line() -> None:
    with pytest.raises(ConfigError, match="is no shell text"):
        guard_command("--push 'a", "e")
