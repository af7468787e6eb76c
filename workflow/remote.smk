"""Train where no file system is shared: a bundle in, an outcome out, each a single file.

    snakemake -s workflow/remote.smk --cores 8 results/expert-sql/outcome.tar

Needs:  results/{expert}/bundle.tar            made by the Snakefile, on a machine without a GPU
Makes:  results/{expert}/outcome.tar           report, records, model, logs; for open_bundle.py --outcome

The job opens the bundle in its own folder and runs the Snakefile there, so that a retry on the same
disk resumes. --config takes gpu (cards of the job), threads, retries, place (that folder), guard:
options of guard_run.py, such as --push s3://… to resume on another disk (copies are below the
expert's name there), allow_own_code (for a bundle with its maker's own scoring task), and code:
where this project is in an image whose jobs get no copy of it. See docs/bundles.md.
"""

import os
import sys
import time
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")

PLACES = [Path(workflow.basedir).parent, Path(config.get("code", "."))]
CODE = next((p for p in PLACES if (p / "Snakefile").is_file()), PLACES[0])
SCRIPTS = CODE.absolute() / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))

from expertflow.config import guard
from expertflow.core.attempts import RUN, will_fail_again
from expertflow.rental.guard.options import guard_command

guard.set_environment(SCRIPTS, main=workflow.is_main_process)
if workflow.is_main_process:
    # Jobs inherit it, so that errors of an earlier run do not end the retries of this one.
    os.environ[RUN] = f"{os.getpid()} {time.time()}"

OPTIONS = config.get("guard", "")
ALLOWED = [key for key in ("allow_own_code", "allow_judge") if config.get(key)]
guard.one_line(guard_command)(OPTIONS, "any")


wildcard_constraints:
    expert=r"[^/]+",


rule train_bundle:
    input:
        "results/{expert}/bundle.tar",
    output:
        "results/{expert}/outcome.tar",
    log:
        "results/{expert}/logs/train_bundle.log",
    # A job elsewhere runs its own Snakemake, which would retry inside each retry.
    retries: int(config.get("retries", 3)) if workflow.is_main_process else 0
    conda:
        "../envs/expertflow.yaml"
    threads: int(config.get("threads", 8))
    resources:
        gpu=int(config.get("gpu", 1)),
        attempt=lambda wildcards, attempt: attempt,
        # A retry that would end with the same error does so in silence.
        repeats=lambda wildcards, attempt: int(
            attempt > 1 and will_fail_again(f"results/{wildcards.expert}/logs/train_bundle.log")
        ),
        # Resources, not params: a different value does not make a finished outcome again.
        place=lambda wildcards: f"{config.get('place', 'remote')}/{wildcards.expert}",
        guard=lambda wildcards: guard_command(OPTIONS, wildcards.expert),
        allow=" ".join(f"--{key.replace('_', '-')}" for key in ALLOWED),
    # Both scripts record the same attempt: opened, run and packed, or the error that ended it, with
    # which open_bundle.py then ends the retries.
    shell:
        "[ {resources.repeats} = 0 ] || exec 2> /dev/null; "
        'start=$(date +%s.%N) log=$PWD/{log:q} code=0; exec 2> >(tee -i "$log" >&2); '
        "EXPERTFLOW_START=$start EXPERTFLOW_LOG=$log EXPERTFLOW_ATTEMPT={resources.attempt}"
        ' python "$EXPERTFLOW/open_bundle.py" {input:q}'
        " --directory {resources.place:q} --replace {resources.allow}; "
        "(cd {resources.place:q} && exec env -u SNAKEMAKE_PROFILE {resources.guard}"
        " snakemake results/{wildcards.expert:q}/report.json"
        ' -s "$EXPERTFLOW/../../Snakefile" --workflow-profile "$EXPERTFLOW/../../profiles/default"'
        " --cores {threads} --resources gpu={resources.gpu}) || code=$?; "
        'EXPERTFLOW_START=$start EXPERTFLOW_LOG=$log python "$EXPERTFLOW/make_outcome.py"'
        " {wildcards.expert:q} --directory {resources.place:q} --output {output:q} --code $code"
