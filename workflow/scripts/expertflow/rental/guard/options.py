"""The guard's command line."""

import argparse
import math
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.core.records import Record
from expertflow.rental.guard.places import RESULTS, STATE, check_directory, check_disk
from expertflow.rental.sync.destination import check_destination


class Settings(Record, frozen=True, kw_only=True):
    """What the guard was told."""

    command: tuple[str, ...]
    usd_per_hour: float | None
    max_usd: float | None
    paid_since_s: float | None
    forget_spent: bool
    reserve_s: float
    idle_minutes: float
    idle_percent: float
    stalled_minutes: float
    notice_command: str | None
    notice_s: float
    grace_s: float
    push: str | None
    push_minutes: float
    pull: bool
    sync_to: str | None
    sync_retries: int
    skip: frozenset[str]
    on_finish: str | None
    without_sync: bool
    disk_stays: bool
    results: Path
    state: Path


def settings_from(arguments: Sequence[str], description: str | None) -> Settings:
    """Read the command line; what follows ``--`` is the command.

    Raises:
        ConfigError: settings contradict each other.
    """
    parser = _parser(description)
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    command = tuple(words[cut + 1 :])
    if not command:
        raise ConfigError("no command to guard; put it behind --, as in -- snakemake --cores 8")
    settings = Settings(
        command=command,
        usd_per_hour=args.usd_per_hour,
        max_usd=args.max_usd,
        paid_since_s=None if args.paid_since is None else _moment_s(args.paid_since),
        forget_spent=args.forget_spent,
        reserve_s=args.reserve_seconds,
        idle_minutes=args.idle_minutes,
        idle_percent=args.idle_percent,
        stalled_minutes=args.stalled_minutes,
        notice_command=args.notice_command,
        notice_s=args.notice_seconds,
        grace_s=args.grace_seconds,
        push=args.push,
        push_minutes=args.push_minutes,
        pull=not args.no_pull,
        sync_to=args.sync_to,
        sync_retries=args.sync_retries,
        skip=frozenset(args.skip),
        on_finish=args.on_finish,
        without_sync=args.without_sync,
        disk_stays=args.disk_stays,
        results=args.results,
        state=args.state,
    )
    _check(settings)
    return settings


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="guard_run.py [options] -- COMMAND …",
    )
    add = parser.add_argument
    add("--usd-per-hour", type=_positive, help="what the machine costs")
    add("--max-usd", type=_positive, help="stop at a checkpoint before more than this is spent")
    add("--paid-since", metavar="TIME", help="when the meter began, ISO 8601; default: now")
    add("--forget-spent", action="store_true", help="do not count earlier sessions")
    add("--reserve-seconds", type=_number, default=60.0, help="least time kept for save and sync")
    add("--idle-minutes", type=_number, default=10.0, help="stop when no card is busy; 0: never")
    add("--idle-percent", type=_number, default=5.0, help="a card below this share is idle")
    add("--stalled-minutes", type=_number, default=30.0, help="stop at a standstill; 0: never")
    add("--notice-command", metavar="CMD", help="asked every second; exit code 0: machine goes")
    add("--notice-seconds", type=_number, default=5.0, help="time that a notice leaves")
    add("--grace-seconds", type=_number, default=120.0, help="time to save after a stop")
    add("--push", metavar="DEST", help="keep the newest checkpoints there")
    add("--push-minutes", type=_positive, default=10.0)
    add("--no-pull", action="store_true", help="do not bring checkpoints back from there")
    add("--sync-to", metavar="DEST", help="copy results there at the end, and verify them")
    add("--sync-retries", type=int, default=5)
    add("--skip", metavar="NAME", action="append", default=[], help="leave out of the sync")
    add("--on-finish", metavar="CMD", help="run when all is verified: stop the machine")
    add("--without-sync", action="store_true", help="let --on-finish run with nothing copied")
    add("--disk-stays", action="store_true", help="DEST may be a folder of the results' own disk")
    add("--results", type=Path, default=RESULTS)
    add("--state", type=Path, default=STATE)
    return parser


def _check(settings: Settings) -> None:
    if settings.max_usd is not None and settings.usd_per_hour is None:
        raise ConfigError("--max-usd needs --usd-per-hour, the price of this machine")
    for destination in (settings.push, settings.sync_to):
        if destination is not None:
            check_destination(destination)
    if settings.on_finish is not None and settings.sync_to is None and not settings.without_sync:
        raise ConfigError(
            "--on-finish without --sync-to would stop a machine whose results are nowhere else;"
            " add --sync-to DEST, or --without-sync where the disk stays"
        )
    if settings.on_finish is not None and not settings.disk_stays and not settings.without_sync:
        for option, destination in (("--push", settings.push), ("--sync-to", settings.sync_to)):
            check_disk(settings.results, option, destination)
    if settings.results == RESULTS or settings.state == STATE:
        check_directory(settings.command)
    if settings.sync_retries < 0:
        raise ConfigError(f"--sync-retries {settings.sync_retries}: give 0 or more")


def _moment_s(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"--paid-since {text!r} is no time; give it as 2026-01-31T08:00:00+00:00"
        ) from error
    moment_s = moment.astimezone().timestamp()
    if moment_s > time.time():
        raise ConfigError(f"--paid-since {text!r} is still to come; give when the meter began")
    return moment_s


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
