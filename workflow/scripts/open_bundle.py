#!/usr/bin/env python3
"""Open a bundle on the machine that trains, so that the same target starts at staging there.

With --outcome: place that machine's results where a local run would have written them.
"""

import logging
from pathlib import Path

from expertflow.config.code_digest import other_code
from expertflow.config.load import hash_manifest
from expertflow.config.validate import BASEDIR
from expertflow.core import cli
from expertflow.core.errors import ConfigError
from expertflow.rental.bundle.records import OpenedBundle
from expertflow.rental.bundle.tar import read_index
from expertflow.rental.bundle.unpack import land_outcome, open_bundle


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--directory", type=Path, default=Path(), help="where Snakemake will run")
    parser.add_argument("--model", type=Path, help="folder with the base model's weights")
    parser.add_argument("--accept-other-code", action="store_true", help="let rules run again")
    parser.add_argument("--allow-own-code", action="store_true", help="run its maker's own task")
    parser.add_argument("--allow-judge", action="store_true", help="send its judge a key")
    parser.add_argument("--replace", action="store_true", help="replace existing results")
    parser.add_argument("--outcome", action="store_true", help="it is an outcome.tar")
    args = parser.parse_args()
    index = read_index(args.bundle)
    target = f"results/{index.expert}/report.json"
    others = ", ".join(other_code(index.code))
    differs = f"{args.bundle}: made by other code than this checkout's: {others}; check out the"
    differs += " code that made it, or"
    if args.outcome:
        land_outcome(args.bundle, index, args.directory, may_replace=args.replace)
        logging.info("%s is here, verified; see report.html next to it", args.directory / target)
        if others:
            logging.warning("%s a run here repeats these rules and all after them", differs)
        return
    if others and not args.accept_other_code:
        raise ConfigError(f"{differs} let these rules run again with --accept-other-code")
    places = [args.directory / "config", BASEDIR / "config"]
    opened = OpenedBundle(
        index=index,
        settings_here=hash_manifest(index.expert, places),
        allow_own_code=args.allow_own_code,
        allow_judge=args.allow_judge,
    )
    place, model, may_replace = args.directory, args.model, args.replace
    is_new = open_bundle(args.bundle, opened, place, model=model, may_replace=may_replace)
    logging.info("%s: next, snakemake %s", "opened" if is_new else "already open", target)


if __name__ == "__main__":
    cli.run(main)
