"""Read the variant lists of config/ablations and refuse impossible ones."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from expertflow.config.read_yaml import Settings, suggest_name
from expertflow.config.validate import check, find_file, read_checked
from expertflow.core.errors import ConfigError
from expertflow.core.records import fill_record
from expertflow.studies.records import PLAN, AblationSpec, ClaimedRatio, Variant, VariantSpec


def ablation_spec(config: Settings, folders: Sequence[Path]) -> AblationSpec:
    """Return the configured files' variants and claims; ConfigError if one is missing or wrong."""
    settings = config["ablation"]
    variants: dict[str, Variant] = {}
    claims: list[tuple[Path, ClaimedRatio]] = []
    for path in ablation_files(config, folders):
        value = read_checked(path, "ablation")
        new = [Variant(**row) for row in value.get("variants", [])]
        if "ladder" in value:
            new = _ladder(path.stem, value["ladder"], path)
        for variant in new:
            _check_training(variant, path)
            if variant.name in variants:
                raise ConfigError(
                    f"{path}: a second variant is named {variant.name!r}; rename one, names must be"
                    " unique across all files of ablation.files"
                )
            variants[variant.name] = variant
        claims += [(path, ClaimedRatio(**claim)) for claim in value.get("claims", [])]
    for path, claim in claims:
        _check_claim(claim, {*variants, PLAN}, path)
    return AblationSpec(
        preset=config["preset"],
        variants=tuple(variants.values()),
        claims=tuple(claim for _, claim in claims),
        n_repeats=settings["n_repeats"],
        n_warmup_steps=settings["n_warmup_steps"],
        n_timed_steps=settings["n_timed_steps"],
        max_timed_s=float(settings["max_seconds"]),
    )


def variant_spec(spec: AblationSpec, name: str) -> VariantSpec:
    """Return the settings of one variant's job, without its name or position in a ladder.

    Raises ConfigError if there is no such variant.
    """
    named = {variant.name: variant for variant in spec.variants}
    if name not in named:
        raise ConfigError(
            f"no variant is named {name!r} in ablation.files; {suggest_name(name, named)}"
        )
    # A new label or rung measures the same, so it must not rerun anything.
    variant = replace(named[name], label="", of=None, rung=None)
    return fill_record(VariantSpec, spec, variant=variant)


def ablation_files(config: Settings, folders: Sequence[Path]) -> list[Path]:
    """Find the configured lists of variants; ConfigError if one is missing."""
    places, found = [folder / "ablations" for folder in folders], []
    for name in config["ablation"]["files"]:
        problem = f"ablation.files names {name!r}, but config/ablations/{name}.yaml does not exist"
        found.append(find_file(name, places, problem))
    return found


def _ladder(of: str, ladder: Settings, path: Path) -> list[Variant]:
    start = Variant(**ladder["start"], of=of, rung=0)
    rungs, training = [start], start.training
    for i, step in enumerate(ladder["steps"], 1):
        # Each rung undoes some of the start's changes, until only the plan is left.
        training = {k: v for k, v in training.items() if k not in step.get("as_planned", ())}
        own = {key: value for key, value in step.items() if key != "as_planned"}
        rungs.append(Variant(**{"rows": rungs[-1].rows, **own}, training=training, of=of, rung=i))
    # The plan itself is the last rung: leftover changes would not be measured in any step.
    left = [*sorted(training), *(["rows"] if rungs[-1].rows != "packed" else [])]
    if left:
        raise ConfigError(
            f"{path}: the ladder's last step leaves {', '.join(left)} as at the start; add a step"
            " with as_planned (rows: packed for rows), because a ladder must end at the plan"
        )
    return rungs


def _check_training(variant: Variant, path: Path) -> None:
    # Imported here: it loads everything that resolves a plan, and few runs have an ablation.
    from expertflow.plan.override import flags

    # Settings that affect a step's speed, but not the number of processes: timing uses one.
    known = {
        name: setting.plain_schema
        for name, setting in flags().items()
        if "speed" in setting.affects and "processes" not in setting.affects
    }
    schema = {"type": "object", "additionalProperties": False, "properties": known}
    check(variant.training, schema, where=f"{path}: variant {variant.name!r}: training")


def _check_claim(claim: ClaimedRatio, names: set[str], path: Path) -> None:
    for key in (claim.of, claim.to):
        if key not in names:
            raise ConfigError(
                f"{path}: claim {claim.claim!r} names {key!r}, which is not a variant;"
                f" {suggest_name(key, names)}"
            )
    if claim.low is not None and claim.high is not None and claim.low > claim.high:
        raise ConfigError(
            f"{path}: claim {claim.claim!r} has low {claim.low:g} above high {claim.high:g};"
            " exchange them"
        )
