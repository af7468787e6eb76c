"""From packed rows to a scored, exported model.

Needs:  results/{expert}/packing.json, model.json, documents for scoring
Makes:  results/{expert}/plan.json             every setting resolved, with reasons and cost
        results/{expert}/staging.json          where training reads from, and why
        results/{expert}/training.json         the run; model in checkpoint/
        results/{expert}/evaluation.json       before and after
        results/{expert}/export.json           model people load, in merged/
        state/{expert}/…                       undeclared: what a retry resumes from
"""


rule plan_training:
    input:
        packing="results/{expert}/packing.json",
        model="results/{expert}/model.json",
        calibration=calibration_of,
    output:
        "results/{expert}/plan.json",
    log:
        "results/{expert}/logs/plan_training.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=spec_of("plan_training"),
        code=house.code("plan_training"),
        calibration=lambda w, input: (
            ["--calibration", *input.calibration] if input.calibration else []
        ),
    shell:
        'python "$EXPERTFLOW"/plan_training.py --spec {params.spec:q} --code {params.code}'
        " --expert {wildcards.expert:q} --packing {input.packing:q} --model {input.model:q}"
        " {params.calibration:q} --output {output:q} 2> {log:q}"


rule stage_to_nvme:
    input:
        packing="results/{expert}/packing.json",
        rows=ancient("results/{expert}/packed"),
        plan="results/{expert}/plan.json",
    output:
        "results/{expert}/staging.json",
    log:
        "results/{expert}/logs/stage_to_nvme.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=spec_of("stage_to_nvme"),
        code=house.code("stage_to_nvme"),
    shell:
        'python "$EXPERTFLOW"/stage_to_nvme.py --spec {params.spec:q} --code {params.code}'
        " --expert {wildcards.expert:q} --packing {input.packing:q} --rows {input.rows:q}"
        " --output {output:q} 2> {log:q}"


rule train_expert:
    input:
        plan="results/{expert}/plan.json",
        packing="results/{expert}/packing.json",
        model="results/{expert}/model.json",
        staging="results/{expert}/staging.json",
        rows=ancient("results/{expert}/packed"),
        base=ancient("results/{expert}/base_model"),
    output:
        record="results/{expert}/training.json",
        checkpoint=directory("results/{expert}/checkpoint"),
        steps="results/{expert}/steps.jsonl",
        gpu="results/{expert}/gpu.jsonl",
        monitor="results/{expert}/monitor.json",
        preflight="results/{expert}/preflight.json",
    log:
        "results/{expert}/logs/train_expert.log",
    priority: 10
    retries: 3
    conda:
        "../../envs/expertflow.yaml"
    threads: 2
    resources:
        gpu=lambda wildcards: house.expert(wildcards.expert)["training"]["world_size"],
        forecast=forecast_of,
    params:
        spec=spec_of("train_expert"),
        code=house.code("train_expert"),
    shell:
        'python "$EXPERTFLOW"/train_expert.py --spec {params.spec:q} --code {params.code}'
        " --plan {input.plan:q} --packing {input.packing:q} --model {input.model:q}"
        " --staging {input.staging:q} --state state/{wildcards.expert:q}"
        " --checkpoint {output.checkpoint:q} --output {output.record:q}"
        " 2> >(tee -i {log:q} >&2)"


rule evaluate_expert:
    input:
        plan="results/{expert}/plan.json",
        model="results/{expert}/model.json",
        base=ancient("results/{expert}/base_model"),
        training="results/{expert}/training.json",
        checkpoint=ancient("results/{expert}/checkpoint"),
        sources=source_records,
        shards=document_shards,
        documents=ancient(document_files),
        keep="results/{expert}/keep.arrow",
        rows=ancient("results/{expert}/packed"),
        artefacts=ancient(artefacts_of),
    output:
        "results/{expert}/evaluation.json",
    log:
        "results/{expert}/logs/evaluate_expert.log",
    priority: 10
    conda:
        "../../envs/expertflow.yaml"
    threads: 2
    resources:
        gpu=1,
    params:
        spec=spec_of("evaluate_expert"),
        code=house.code("evaluate_expert"),
    shell:
        'python "$EXPERTFLOW"/evaluate_expert.py --spec {params.spec:q} --code {params.code}'
        " --plan {input.plan:q} --model {input.model:q} --checkpoint {input.checkpoint:q}"
        " --shards {input.shards:q} --keep {input.keep:q} --rows {input.rows:q}"
        " --output {output:q} 2> {log:q}"


rule export_model:
    input:
        datasets="results/{expert}/datasets.json",
        model="results/{expert}/model.json",
        base=ancient("results/{expert}/base_model"),
        training="results/{expert}/training.json",
        checkpoint=ancient("results/{expert}/checkpoint"),
        evaluation="results/{expert}/evaluation.json",
        packing="results/{expert}/packing.json",
        rows=ancient("results/{expert}/packed"),
    output:
        record="results/{expert}/export.json",
        directory=directory("results/{expert}/merged"),
    log:
        "results/{expert}/logs/export_model.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=spec_of("export_model"),
        code=house.code("export_model"),
    shell:
        'python "$EXPERTFLOW"/export_model.py --spec {params.spec:q} --code {params.code}'
        " --datasets {input.datasets:q} --model {input.model:q} --training {input.training:q}"
        " --evaluation {input.evaluation:q} --checkpoint {input.checkpoint:q} --rows {input.rows:q}"
        " --directory {output.directory:q} --output {output.record:q} 2> {log:q}"
