"""From packed rows to a scored, exported model.

Needs:  results/{expert}/packing.json, model.json, documents for scoring
Makes:  results/{expert}/references.json       held-out answers that cannot be scored
        results/{expert}/plan.json             every setting resolved, with reasons and cost
        results/{expert}/staging.json          where training reads from, and why
        results/{expert}/training.json         the run; model in checkpoint/, others in its steps/
        results/{expert}/profile/              kernels.json; a trace where steps were profiled
        results/{expert}/generations.json      answers of the models before and after training
        results/{expert}/evaluation.json       before and after; all answers in answers.jsonl
        results/{expert}/export.json           the model to load, in merged/
        state/{expert}/…                       undeclared: what a retry resumes from
        state/.evaluations/{expert}.jsonl      undeclared: earlier evaluations, to compare with
"""


rule plan_training:
    input:
        **wf.files("packing model"),
        calibration=wf.calibration,
        tuning=wf.tuning,
    output:
        **wf.outputs("plan_training"),
    log:
        wf.log("plan_training"),
    priority: wf.priority("plan_training")
    localrule: True
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("plan_training", "expert"),
    shell:
        wf.command("plan_training")


rule check_references:
    input:
        **wf.files("tokenizer (tokenizer/) keep"),
        **wf.shards(wf.document_shards, ".arrow"),
        **wf.artifacts,
    output:
        **wf.outputs("check_references"),
    log:
        wf.log("check_references"),
    # Starts before training, so that a failure saves its cost. It is not an input of train_expert,
    # so that other questions do not repeat one.
    priority: 20
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("check_references", "expert"),
    shell:
        wf.command("check_references", "2> >(tee {log:q} >&2)")


rule stage_to_nvme:
    input:
        **wf.files("packing model rows=packed/ (base_model/) (plan)"),
    output:
        **wf.outputs("stage_to_nvme"),
    log:
        wf.log("stage_to_nvme"),
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("stage_to_nvme", "expert"),
    shell:
        wf.command("stage_to_nvme")


rule train_expert:
    input:
        **wf.files("plan packing model staging (packed/) (base_model/)"),
    output:
        **wf.outputs("train_expert"),
    log:
        wf.log("train_expert"),
    priority: wf.priority("train_expert", 10)
    retries: wf.retries
    conda:
        "../../envs/expertflow.yaml"
    threads: wf.threads
    resources:
        **wf.processes,
        attempt=wf.attempt,
        runtime=wf.minutes,
    params:
        **wf.params("train_expert", "checkpoint state=state/{expert}"),
    shell:
        wf.command(
            "train_expert",
            environment="EXPERTFLOW_ATTEMPT={resources.attempt}",
            on_card=True,
        )


rule generate_answers:
    input:
        **wf.files("plan packing model training staging keep"),
        **wf.files("checkpoint/ rows=packed/ (base_model/) (references)"),
        **wf.shards(wf.document_shards, ".arrow"),
        **wf.artifacts,
    output:
        **wf.outputs("generate_answers"),
    log:
        wf.log("generate_answers"),
    priority: 10
    conda:
        "../../envs/expertflow.yaml"
    threads: wf.threads
    resources:
        gpu=1,
    params:
        **wf.params("generate_answers"),
    shell:
        wf.command("generate_answers", on_card=True)


rule evaluate_expert:
    input:
        **wf.files("generations packing model keep"),
        **wf.shards(wf.document_shards, ".arrow"),
        **wf.artifacts,
    output:
        **wf.outputs("evaluate_expert"),
    log:
        wf.log("evaluate_expert"),
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("evaluate_expert", "answers state=state/.evaluations"),
    shell:
        wf.command("evaluate_expert")


rule export_model:
    input:
        **wf.files("datasets model plan training monitor evaluation"),
        **wf.files("checkpoint/ rows=packed/ (packing) (base_model/)"),
    output:
        **wf.outputs("export_model"),
    log:
        wf.log("export_model"),
    conda:
        "../../envs/expertflow.yaml"
    threads: 4
    resources:
        mem_mb=wf.export_memory,
    params:
        **wf.params("export_model", "directory"),
    shell:
        wf.command("export_model")
