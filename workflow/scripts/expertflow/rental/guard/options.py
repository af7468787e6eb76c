"""The guard's command line, and its options for a job that trains from a bundle."""

import argparse
import math
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from expertflow.core import cli
from expertflow.core.errors import ConfigError
from expertflow.rental.sync.store import check_destination, is_local

# Relative to the folder where the guard is started.
RESULTS, STATE = Path("results"), Path("state")
LONGEST_PAID_S = 366 * 86400.0


def parse_options(arguments: Sequence[str], description: str | None) -> argparse.Namespace:
    """Parse the options before ``--`` and the ``command`` after it; may raise ConfigError."""
    parser = cli.parser(description)
    parser.usage = "guard_run.py [options] -- COMMAND …"

    def add(option: str, words: str | None = None, **settings: Any) -> None:
        parser.add_argument(option, help=words, **settings)

    add("--usd-per-hour", "price of the machine", type=_positive)
    add("--max-usd", "stop at a checkpoint before more than this is spent", type=_positive)
    since = "when billing started, ISO 8601; default: now"
    add("--paid-since", since, dest="paid_since_s", metavar="TIME", type=_moment_s)
    add("--forget-spent", "do not count earlier sessions", action="store_true")
    add("--idle-minutes", "stop when no card is busy; 0: never", type=_number, default=10.0)
    add("--stalled-minutes", "stop at a standstill; 0: never", type=_number, default=30.0)
    add("--notice-command", "run every second; exit 0: machine is reclaimed", metavar="CMD")
    add("--grace-seconds", "time to save after a stop or notice", type=_number, default=120.0)
    # Shells do not expand the tilde in --push=~/x.
    home = os.path.expanduser
    add("--push", "copy the newest checkpoints there", metavar="DEST", type=home)
    add("--push-minutes", type=_positive, default=10.0)
    add("--no-pull", "do not restore checkpoints", dest="pull", action="store_false")
    add("--sync-to", "copy results there at the end, and verify them", metavar="DEST", type=home)
    add("--on-finish", "run once all is verified, to stop the machine", metavar="CMD")
    add("--without-sync", "let --on-finish run with nothing copied", action="store_true")
    add("--disk-stays", "DEST may be a folder on the results' disk", action="store_true")
    add("--results", type=lambda text: Path(home(text)), default=RESULTS)
    add("--state", type=lambda text: Path(home(text)), default=STATE)
    # Split at the first -- here, because argparse would take the command's options for its own.
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    command = words[cut + 1 :]
    options = parser.parse_args(words[:cut], argparse.Namespace(command=command))
    if not command:
        raise ConfigError("no command to guard; put it after --, as in -- snakemake --cores 8")
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    if options.max_usd is not None and options.usd_per_hour is None:
        raise ConfigError("--max-usd needs --usd-per-hour, the price of this machine")
    destinations = {"--push": options.push, "--sync-to": options.sync_to}
    given = {option: place for option, place in destinations.items() if place is not None}
    for option, destination in given.items():
        check_destination(destination)
        if is_local(destination):
            _check_folder(option, Path(destination), options)
    for option, line in _shell_lines(options).items():
        # A shell exits with 0: as if the machine had been stopped, or were being reclaimed.
        if not line.strip():
            raise ConfigError(f"{option} is empty; pass a command, or omit it")
    stops_machine = options.on_finish is not None and not options.without_sync
    if stops_machine and options.sync_to is None:
        raise ConfigError(
            "--on-finish without --sync-to would stop a machine whose results are nowhere else;"
            " add --sync-to DEST, or --without-sync if the disk is kept"
        )
    if stops_machine and not options.disk_stays:
        for option, destination in given.items():
            for folder in (options.results, options.state):
                if is_local(destination) and _device(Path(destination)) == _device(folder):
                    raise ConfigError(
                        f"{option} {destination}: is on the disk of {folder}, which --on-finish may"
                        " delete; use a folder on another disk, host:path or s3://…, or pass"
                        " --disk-stays if the disk is kept"
                    )
    names = [Path(word).name for word in options.command]
    if "snakemake" in names and (options.results == RESULTS or options.state == STATE):
        for word in options.command[names.index("snakemake") + 1 :]:
            if word.startswith(("--directory", "-d")):
                raise ConfigError(
                    f"{word}: Snakemake would write where the guard does not look; start the guard"
                    " in that folder, or set --results and --state"
                )


def _check_folder(option: str, destination: Path, options: argparse.Namespace) -> None:
    """Raise ConfigError if copies would overwrite their source, or contain earlier copies."""
    for folder in (options.results, options.state):
        own = folder.resolve()
        copies = [(destination / name).resolve() for name in ("results", "state")]
        if own in copies or destination.resolve().is_relative_to(own):
            raise ConfigError(
                f"{option} {destination}: {folder} would be copied into itself; use a folder that"
                " neither contains it nor is inside it"
            )


def _shell_lines(options: argparse.Namespace) -> dict[str, str]:
    lines = {"--on-finish": options.on_finish, "--notice-command": options.notice_command}
    return {option: line for option, line in lines.items() if line is not None}


def check_programs(options: argparse.Namespace) -> None:
    """Reject a shell command whose program is missing here, before hours are paid for."""
    for option, line in _shell_lines(options).items():
        # Anything but a plain first word is left to the shell.
        found = re.match(r"\s*([\w./+-]+)(?!\S)", line)
        if found is None:
            continue
        asked = ["sh", "-c", 'command -v -- "$0"', found[1]]
        if subprocess.run(asked, capture_output=True, check=False).returncode != 0:
            raise ConfigError(f"{option}: there is no {found[1]!r} here; install it, or correct it")


def _device(path: Path) -> int:
    # A folder that does not exist yet will be on the disk of its nearest parent.
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place.stat().st_dev


def _moment_s(text: str) -> float:
    try:
        moment_s = datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--paid-since {text!r} is not a time; write it as 2026-01-31T08:00:00+00:00"
        ) from error
    now = datetime.now().astimezone()
    paid_s = now.timestamp() - moment_s
    if not 0 <= paid_s <= LONGEST_PAID_S:
        which = "in the future" if paid_s < 0 else "over a year ago"
        raise ConfigError(
            f"--paid-since {text!r} is {which} by this machine's clock, {now:%Y-%m-%d %H:%M %Z};"
            " set it to when billing started, or correct the clock"
        )
    return moment_s


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write it as 2.49") from error
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def guard_command(options: str, expert: str) -> str:
    """Return the guard command of an expert's job, empty without options; may raise ConfigError."""
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise ConfigError(
            f"guard: {options!r} is not valid shell syntax ({error}); correct it, and do not end it"
            " with a quote, which Snakemake strips"
        ) from error
    if not words:
        return ""
    # argparse accepts --o for --on-finish, the only option that begins with it.
    if any(word.startswith("--o") for word in words):
        raise ConfigError(
            "guard: --on-finish would stop the machine before the outcome is packed; omit it, and"
            " let what started the job stop the machine"
        )
    # In a shared destination, each job would take the others' copies for its own older ones.
    places = ("--push", "--sync-t", "--sync-to")
    for i, word in enumerate(words):
        name, given, place = word.partition("=")
        if given and name in places:
            words[i] = f"{name}={place.rstrip('/')}/{expert}"
        elif i and words[i - 1] in places:
            words[i] = f"{word.rstrip('/')}/{expert}"
    return f'python "$EXPERTFLOW/guard_run.py" {shlex.join(words)} --'
