"""expertflow: raw data in, fine-tuned experts out, with a receipt.

    sources.lock.json      what the sources hold, pinned while this file is parsed
      |
    fetch_source / generate_source          raw records on this disk
      |
    find_datasets                           which data sets, licences, shards
      |
    prepare_shard  (one job a shard)        validated documents
      |         \
      |        prepare_tokenizer            tokenizer and layout of chats
      |         |
      |        pretokenize_shard            token ids of all documents
      |         |
    deduplicate_documents                   kept or dropped; train or held out
      |        /
    pack_sequences                          rows of one length
      |
      |        prepare_model                base model; beside all of the above but its tokenizer
      |        /
    tune_expert                             fastest settings here; only where asked for
      |
    calibrate_expert                        seconds of a step; only where asked for
      |
    plan_training                           every setting with its reason, hours, dollars
      |           \
      |          make_bundle                one file for another machine; only where asked for
      |          ablate_variant, ablate_expert    what each switch is worth; only where asked for
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

from expertflow.config import allocation, guard, run_lock
from expertflow.config.corrupt_records import remove_corrupt_records
from expertflow.config.workflow import Workflow, files_of

# The user's own config/ in the working directory wins over the one beside this file.
OWN_CONFIG = Path("config", "config.yaml")


configfile: OWN_CONFIG if OWN_CONFIG.is_file() else BASEDIR.joinpath("config", "config.yaml")


LOOKS = guard.only_looks(sys.argv[1:], dryrun=workflow.output_settings.dryrun)
GPU_LIMIT = workflow.global_resources.get("gpu")
remove_corrupt_records(Path("results"), looks=LOOKS, main=workflow.is_main_process)
wf = Workflow(
    config=config,
    basedir=BASEDIR,
    main=workflow.is_main_process,
    looks=LOOKS,
    told=workflow.config_settings.overwrite_config,
    gpu_limit=GPU_LIMIT,
)
guard.set_environment(wf.scripts, main=wf.main)
if wf.main:
    run_lock.sign_jobs()
    guard.refuse_unlimited_gpus(GPU_LIMIT)
    guard.note_missing_table(workflow.output_settings, BASEDIR)


wildcard_constraints:
    expert=r"[^/]+",
    source=r"[A-Za-z0-9_-]+",
    shard=r"\d{3}",


include: "workflow/rules/data.smk"
include: "workflow/rules/tokens.smk"
include: "workflow/rules/tune.smk"
include: "workflow/rules/calibrate.smk"
include: "workflow/rules/bundle.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/ablate.smk"
include: "workflow/rules/report.smk"


# Of seconds each: not worth a job of its own where there is a cluster.
localrules:
    find_datasets,
    plan_training,
    build_report,
    compare_experts,


rule all:
    default_target: True
    input:
        "results/index.html",


onstart:
    guard.refuse_keep_incomplete(workflow.execution_settings)
    allocation.refuse_missing_slurm(workflow.executor_plugin.name)
    jobs = list(workflow.dag.needrun_jobs())
    wf.refuse_misfits(jobs)
    run_lock.hold(jobs, slurm_run=run_lock.slurm_run_name(workflow), main=wf.main)


onsuccess:
    reports = guard.reports_to_sum_up(workflow.dag_settings.targets, wf.experts)
    if reports:
        shell('python "$EXPERTFLOW"/show_report.py {reports:q}')
