"""expertflow: raw data in, fine-tuned experts out, with a receipt.

    sources.lock.json                  content of the sources, pinned
          |
    fetch_source / generate_source     raw records on this disk
          |
    find_datasets                      which data sets, licenses, shards
          |
    prepare_shard                      validated documents; rejects with their reason
          |        \
          |       prepare_tokenizer    tokenizer and chat layout, hashed
          |         |
          |       pretokenize_shard    token ids of all documents, made once
          |         |
    deduplicate_documents              kept or dropped; train or held out
          |        /
    pack_sequences                     rows of one length, documents isolated
          |
    check_references                   held-out answers that cannot be scored
          |
    prepare_model                      base model, hashed
          |
    tune_expert *                      fastest settings here
          |
    calibrate_expert *                 seconds per step
          |
    plan_training                      every setting with its reason; memory, hours, dollars
          |        \
          |       make_bundle *        one file for another machine
          |
    stage_to_nvme                      rows on a fast disk, or why not
          |        \
          |       ablate_variant *     what one switch is worth here
          |         |
          |       ablate_expert *      what each switch is worth here, next to the claims
          |
    train_expert                       checkpoint, resumable at any moment
          |
    generate_answers                   both models, on documents training never saw
          |
    evaluate_expert                    scores and baselines; no card
          |
    export_model                       merged model and model card
          |
    build_report                       report.json, report.html
          |
    compare_experts                    results/index.html
                                       * only on request

Each rule lives in workflow/rules, calls the script of its name in workflow/scripts, and depends on
three things only: the content of its inputs, its settings (params.spec) and its code (params.code).
"""

import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")

# The folder of this file, even if another Snakefile uses it as a module.
BASEDIR = Path(workflow.current_basedir.get_path_or_uri(secret_free=False))
sys.path.insert(0, str(BASEDIR / "workflow" / "scripts"))

from expertflow.config.attach import add_forecasts, attach

# The user's own config/ in the working directory wins over the one next to this file.
OWN_CONFIG = Path("config", "config.yaml")


configfile: OWN_CONFIG if OWN_CONFIG.is_file() else BASEDIR / "config" / "config.yaml"


wf = attach(workflow, config, BASEDIR)


wildcard_constraints:
    expert=r"[^/]+",
    source=r"[A-Za-z0-9_-]+",
    shard=r"\d{3}",
    variant=r"[A-Za-z0-9_-]+",


for rules_file in sorted((BASEDIR / "workflow" / "rules").glob("*.smk")):

    include: rules_file


add_forecasts(workflow, wf)


rule all:
    default_target: True
    input:
        "results/index.html",
