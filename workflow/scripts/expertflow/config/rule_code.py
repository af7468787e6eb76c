"""The digest of the code behind each rule, and behind each generator."""

from pathlib import Path

from expertflow.config import digest

GENERATORS = "expertflow.data.sources.generated"
# How a generator is called among rules.
GENERATOR = "generator "
# The rules of the chain, whose code a bundle is made by or is to be used with.
CHAIN = (
    "fetch_source", "generate_source", "find_datasets", "prepare_shard", "deduplicate_documents",
    "prepare_model", "pretokenize_shard", "pack_sequences", "calibrate_expert", "plan_training",
    "stage_to_nvme", "train_expert", "evaluate_expert", "export_model", "build_report",
)  # fmt: skip
# Files that a script reads beside its imports: a change of theirs is a change of its code.
TEMPLATES = "scripts/expertflow/report/templates"
RESOURCES = {
    "export_model": ("scripts/expertflow/export/card.md.j2",),
    "build_report": (
        f"{TEMPLATES}/page.html.j2",
        f"{TEMPLATES}/macros.html.j2",
        f"{TEMPLATES}/evaluation.html.j2",
        f"{TEMPLATES}/answers.html.j2",
        f"{TEMPLATES}/comparison.html.j2",
        f"{TEMPLATES}/ablation_parts.html.j2",
        f"{TEMPLATES}/profile.html.j2",
        f"{TEMPLATES}/style.css",
    ),
    "ablate_expert": (
        f"{TEMPLATES}/ablation.html.j2",
        f"{TEMPLATES}/ablation_parts.html.j2",
        f"{TEMPLATES}/macros.html.j2",
        f"{TEMPLATES}/style.css",
    ),
    "compare_experts": (
        f"{TEMPLATES}/index.html.j2",
        f"{TEMPLATES}/style.css",
    ),
}


def code_extras(script: Path) -> tuple[Path, ...]:
    """List the files that belong to a script's code without being imported."""
    return tuple(script.parents[1] / name for name in RESOURCES.get(script.stem, ()))


def rule_digest(rule: str, scripts: Path) -> str:
    """Give the digest of a rule's script and all it imports."""
    script = scripts / f"{rule}.py"
    return digest.code_digest(script, extra=code_extras(script))


def generator_digest(generator: str, scripts: Path) -> str:
    """Give the digest of a generator and all it imports."""
    return digest.module_digest(f"{GENERATORS}.{generator}", scripts)


def chain_digests(generators: list[str], scripts: Path) -> dict[str, str]:
    """Give the digests of all rules of the chain, and of some generators."""
    made = {GENERATOR + name: generator_digest(name, scripts) for name in generators}
    return {**{rule: rule_digest(rule, scripts) for rule in CHAIN}, **made}


def other_code(made_by: dict[str, str], scripts: Path) -> tuple[str, ...]:
    """Name the rules and generators of which ``scripts`` holds other code, or none."""
    generators = [name.removeprefix(GENERATOR) for name in made_by if name.startswith(GENERATOR)]
    known = [name for name in generators if _module(name, scripts).is_file()]
    here = chain_digests(known, scripts)
    return tuple(name for name, code in sorted(made_by.items()) if code != here.get(name))


def _module(generator: str, scripts: Path) -> Path:
    return scripts.joinpath(*GENERATORS.split("."), f"{generator}.py")
