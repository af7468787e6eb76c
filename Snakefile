"""expertflow: raw data in, fine-tuned experts out, with a receipt.

    sources.lock.json      what the sources hold, pinned while this file is parsed
      |
    fetch_source / generate_source          raw records on this disk
      |
    find_datasets                           which data sets, licences, shards
      |
    prepare_shard  (one job a shard)        validated documents
      |         \
      |        prepare_model                base model and tokenizer
      |         |
      |        pretokenize_shard            token ids of all documents
      |         |
    deduplicate_documents                   kept or dropped; train or held out
      |        /
    pack_sequences                          rows of one length
      |
    calibrate_expert                        seconds of a step; only where asked for
      |
    plan_training                           every setting with its reason, hours, dollars
      |
    stage_to_nvme                           rows on a fast disk, or why not
      |
    train_expert                            checkpoint
      |
    evaluate_expert                         before and after, on held-out documents
      |
    export_model                            merged model and card
      |
    build_report                            report.json, report.html
      |
    compare_experts                         results/index.html over all experts

Each rule lives in workflow/rules, calls the script of its name in workflow/scripts, and depends on
three things only: the content of its inputs, its settings (params.spec) and its code (params.code).
"""

import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")

BASEDIR = Path(workflow.basedir)
sys.path.insert(0, str(BASEDIR / "workflow" / "scripts"))

from expertflow.config import guard
from expertflow.config.house import House

# The user's own config/ in the working directory wins over the one beside this file.
OWN_CONFIG = Path("config", "config.yaml")


configfile: OWN_CONFIG if OWN_CONFIG.is_file() else BASEDIR.joinpath("config", "config.yaml")


house = House(config=config, basedir=BASEDIR, main=workflow.is_main_process)
guard.set_environment(house.scripts, main=house.main)

guard.refuse_unlimited_gpus(workflow.global_resources.get("gpu"), main=house.main)
guard.note_missing_table(workflow.output_settings, BASEDIR, main=house.main)


wildcard_constraints:
    expert=r"[^/]+",
    source=r"[A-Za-z0-9_-]+",
    shard=r"\d{3}",


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/tokens.smk"
include: "workflow/rules/calibrate.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        "results/index.html",


onsuccess:
    reports = guard.reports_to_sum_up(workflow.dag_settings.targets, house.experts)
    if reports:
        shell('python "$EXPERTFLOW"/show_report.py {reports:q}')
