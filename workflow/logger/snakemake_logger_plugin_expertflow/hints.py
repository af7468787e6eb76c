"""Turn Snakemake's errors about its command line into one line with the right command."""

import re
import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

NO_RULE = re.compile(r"No rule to produce (\S+)")
NO_PAGE = re.compile(r"File (\S+) marked for report but does not exist")
DENIED = re.compile(r"PermissionError.*Permission denied: '(.+?)'", re.DOTALL)
BAD_CONFIG = "Invalid config definition"


def explain(text: str, arguments: Sequence[str]) -> str:
    """Return a Snakemake error as one line, with a fix if one is known."""
    if found := NO_RULE.search(text):
        return _explain_target(found[1])
    if BAD_CONFIG in text and (hint := _explain_config(arguments)):
        return hint
    if found := NO_PAGE.search(text):
        return _explain_report(found[1])
    if found := DENIED.search(text):
        return f"{found[1]}: permission denied; correct its permissions or its folder's"
    told = text.rstrip().rpartition("\n")[2] if text.startswith("Traceback") else text
    return " ".join(line.strip() for line in told.splitlines() if line.strip())


def _explain_target(target: str) -> str:
    if "/" in target:
        return f"{target}: no rule makes it; an expert's report is results/EXPERT/report.json"
    return (
        f"{target}: no file or rule has this name; to make that expert:"
        f" snakemake results/{target}/report.json"
    )


def _explain_config(arguments: Sequence[str]) -> str | None:
    """Return what is wrong with the arguments of ``--config``; null if nothing is.

    >>> _explain_config(["--config", "preset=full", "hardware=H100", "SXM", "-n"])
    "--config: SXM is not KEY=VALUE; quote a value with spaces: --config 'hardware=H100 SXM'"
    """
    for i, argument in enumerate(arguments):
        if argument not in ("--config", "-C"):
            continue
        # --config takes all words up to the next option.
        words = list(takewhile(lambda word: not word.startswith("-"), arguments[i + 1 :]))
        n_pairs = len(list(takewhile(lambda word: "=" in word, words)))
        for word in words[:n_pairs]:
            key, _, value = word.partition("=")
            if "." in key:
                first, *rest = key.split(".")
                nested = "".join(f"{{{name}: " for name in rest) + value + "}" * len(rest)
                return f"{argument}: {key} has a dot; write {argument} '{first}={nested}'"
        if n_pairs == len(words):
            continue
        odd, what = words[n_pairs], f"{argument}: {words[n_pairs]} is not KEY=VALUE"
        # In `--config results/a/report.json` the target was parsed as a config entry.
        if n_pairs == 0 or "/" in odd:
            return f"{what}; put the target before {argument}: snakemake {odd} {argument} …"
        quoted = shlex.quote(f"{words[n_pairs - 1]} {odd}")
        return f"{what}; quote a value with spaces: {argument} {quoted}"
    return None


def _explain_report(page: str) -> str:
    made = sorted(map(str, Path("results").glob("*/report.json")))
    named = " ".join(map(shlex.quote, made)) or "results/EXPERT/report.json"
    return (
        f"{page} does not exist yet, and --report covers all experts by default; list those that"
        f" are finished: snakemake --report report.zip {named}"
    )
