"""Measure what a small model learns on real data, against answering without one.

    python bench/learned.py wikisql [--data ../shared/data] [--work DIR] [--cores 2] [--short]

Arranges the data as docs/examples/{name}.yaml expects it, runs the entire chain, and prints the
scores of the baselines, the untrained and the trained model on the same held-out questions, with
95 % intervals; baselines learn from the training side. ``--short`` trains only a few steps, to
check that everything runs. Benches: wikisql, gsm8k, json, typescript, cypher. Last line: JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from learned_data import FOLDERS, lay_out

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
SNAKEMAKE = Path(sys.executable).with_name("snakemake")
SHORT = {
    "training": {"max_steps": 6, "eval_steps": 6},
    "evaluation": {"max_examples": 8, "n_selection_examples": 0, "max_new_tokens": 12},
}
# The bar is the better of these two. The others are shown only.
BAR = ("constant", "template")

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=sorted(FOLDERS))
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the real data")
    parser.add_argument("--work", type=Path, help="folder to run in (default: a new one)")
    parser.add_argument("--cores", type=int, default=2, help="cores for Snakemake")
    parser.add_argument("--short", action="store_true", help="a few steps, a few questions")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix=f"learned-{arguments.name}-"))
    print(f"running in {work}", flush=True)
    run(arguments.name, arguments.data, work, n_cores=arguments.cores, short=arguments.short)
    found = figures(arguments.name, work)
    print(table(found))
    print(json.dumps(found, ensure_ascii=False))


def run(name: str, data: Path, work: Path, *, n_cores: int, short: bool) -> None:
    """Arrange the data and run the chain up to its report."""
    example = ROOT / "docs" / "examples" / f"{name}.yaml"
    manifest = yaml.safe_load(example.read_text(encoding="utf-8"))
    lay_out(name, data, work / "data", manifest["data"]["eval_fraction"])
    experts = work / "config" / "experts"
    experts.mkdir(parents=True, exist_ok=True)
    (experts / f"{name}.yaml").write_text(example.read_text(encoding="utf-8"), encoding="utf-8")
    config = {"preset": "full", "hardware": "cpu", "experts": {name: SHORT if short else {}}}
    (work / "config" / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [str(SNAKEMAKE), "-s", str(ROOT / "Snakefile"), "--cores", str(n_cores), "--quiet"]
    command += ["--", f"results/{name}/report.json"]
    with (work / "snakemake.log").open("wb") as log:
        done = subprocess.run(command, cwd=work, stdout=log, stderr=log)
    if done.returncode != 0:
        raise SystemExit(f"snakemake failed; see {work / 'snakemake.log'}")


def figures(name: str, work: Path) -> Figures:
    """Read the measurements from the records of the run."""
    results = work / "results" / name
    evaluation, training, report = (
        json.loads((results / f"{stage}.json").read_text(encoding="utf-8"))
        for stage in ("evaluation", "training", "report")
    )
    changes = {change["quantity"]: change for change in evaluation["changes"]}
    metric = evaluation["after"]["score"]["metric"]
    rows = [
        {"name": one["name"], "description": one["description"]}
        | describe_score(one["score"], one["change"])
        for one in evaluation["baselines"]
    ]
    for name, change in (("before", changes.get(metric)), ("after", None)):
        rows.append({"name": name} | describe_score(evaluation[name]["score"], change))
    return {
        "bench": name,
        "metric": metric,
        "rows": rows,
        "beats_bar": beats_bar(rows),
        "held_out_loss": [evaluation[side]["held_out_loss"] for side in ("before", "after")],
        "training_minutes": training["time"]["wall_s"] / 60,
        "evaluation_minutes": evaluation["wall_s"] / 60,
        "n_steps": training["n_steps"],
        "published_step": evaluation["published"]["step"],
        "weights_sha256": evaluation["published"]["weights_sha256"],
        "n_training_documents": report["data"]["documents_train"],
        "unavailable": evaluation["unavailable"],
    }


def describe_score(score: Figures, change: Figures | None) -> Figures:
    kept = {key: score[key] for key in ("n_correct", "n_examples", "value_fraction", "ci95")}
    return kept | {"reason": score["reason"], "expert_less_this": change}


def beats_bar(rows: list[Figures]) -> bool | None:
    """Return whether the expert beats the better of constant and template by an entire interval."""
    bars = [row for row in rows if row["name"] in BAR and row["value_fraction"] is not None]
    if not bars:
        return None
    best = max(bars, key=lambda row: float(row["value_fraction"]))
    return bool(best["expert_less_this"]["ci95"][0] > 0)


def table(found: Figures) -> str:
    lines = [f"{'':16}{'right':>10}{found['metric']:>26}  expert minus this"]
    for row in found["rows"]:
        if row["value_fraction"] is None:
            lines.append(f"{row['name']:16}{'-':>10}  {row['reason']}")
            continue
        right = f"{row['n_correct']}/{row['n_examples']}"
        value = "{:.1%} [{:.1%}, {:.1%}]".format(row["value_fraction"], *row["ci95"])
        line = f"{row['name']:16}{right:>10}{value:>26}"
        if change := row["expert_less_this"]:
            points = (100 * end for end in (change["difference"], *change["ci95"]))
            line += "  {:+.1f} [{:+.1f}, {:+.1f}] points: {}".format(*points, change["change"])
        lines.append(line)
    said = {True: "yes", False: "no", None: "unknown: there is no such baseline"}
    lines += [
        f"the expert beats the best of {' and '.join(BAR)}: {said[found['beats_bar']]}",
        f"{found['n_steps']} steps in {found['training_minutes']:.1f} minutes on "
        f"{found['n_training_documents']} documents; step {found['published_step']} is published",
        *(f"{one['name']}: {one['description']}" for one in found["rows"] if "description" in one),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
