"""From packed rows to a scored, exported model.

Needs:  results/{expert}/packing.json, model.json, documents for scoring
Makes:  results/{expert}/plan.json             every setting resolved, with reasons and cost
        results/{expert}/staging.json          where training reads from, and why
        results/{expert}/training.json         the run; model in checkpoint/, others in its steps/
        results/{expert}/profile/              kernels.json; a trace where steps were profiled
        results/{expert}/evaluation.json       before and after; all answers in answers.jsonl
        results/{expert}/export.json           model people load, in merged/
        state/{expert}/…                       undeclared: what a retry resumes from
        state/.evaluations/{expert}.jsonl      undeclared: earlier evaluations, to compare with
"""


rule plan_training:
    input:
        packing="results/{expert}/packing.json",
        model="results/{expert}/model.json",
        calibration=wf.calibration,
        tuning=wf.tuning,
    output:
        "results/{expert}/plan.json",
    log:
        "results/{expert}/logs/plan_training.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("plan_training"),
        code=wf.code("plan_training"),
        calibration=lambda w, input: (
            ["--calibration", *input.calibration] if input.calibration else []
        ),
        tuning=lambda w, input: ["--tuning", *input.tuning] if input.tuning else [],
    shell:
        'python "$EXPERTFLOW"/plan_training.py --spec {params.spec:q} --code {params.code}'
        " --expert {wildcards.expert:q} --packing {input.packing:q} --model {input.model:q}"
        " {params.calibration:q} {params.tuning:q} --output {output:q} 2> {log:q}"


rule stage_to_nvme:
    input:
        packing="results/{expert}/packing.json",
        rows=ancient("results/{expert}/packed"),
        model="results/{expert}/model.json",
        base=ancient("results/{expert}/base_model"),
        plan="results/{expert}/plan.json",
    output:
        "results/{expert}/staging.json",
    log:
        "results/{expert}/logs/stage_to_nvme.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("stage_to_nvme"),
        code=wf.code("stage_to_nvme"),
    shell:
        'python "$EXPERTFLOW"/stage_to_nvme.py --spec {params.spec:q} --code {params.code}'
        " --expert {wildcards.expert:q} --packing {input.packing:q} --rows {input.rows:q}"
        " --model {input.model:q} --output {output:q} 2> {log:q}"


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
        profile=directory("results/{expert}/profile"),
    log:
        "results/{expert}/logs/train_expert.log",
    priority: 10
    # A job of a cluster is a Snakemake of its own, which would retry inside of each retry.
    retries: 3 if wf.main else 0
    conda:
        "../../envs/expertflow.yaml"
    threads: 2
    resources:
        gpu=wf.n_gpus,
        runtime=wf.minutes,
        nodes=wf.n_nodes,
        tasks=wf.n_nodes,
        mpi=wf.mpi,
        tasks_per_gpu=wf.tasks_per_gpu,
        # For the table of a dry run. Jobs of one group must agree on every text: none there.
        forecast=lambda w: (
            wf.forecast(w)
            if workflow.output_settings.dryrun and not workflow.group_settings.group_components
            else None
        ),
    params:
        spec=wf.spec("train_expert"),
        code=wf.code("train_expert"),
    shell:
        'exec python "$EXPERTFLOW"/train_expert.py --spec {params.spec:q} --code {params.code}'
        " --plan {input.plan:q} --packing {input.packing:q} --model {input.model:q}"
        " --staging {input.staging:q} --state state/{wildcards.expert:q}"
        " --checkpoint {output.checkpoint:q} --output {output.record:q}"
        " 2> >(trap '' HUP INT TERM PIPE; exec tee {log:q} >&2)"


rule evaluate_expert:
    input:
        plan="results/{expert}/plan.json",
        packing="results/{expert}/packing.json",
        model="results/{expert}/model.json",
        base=ancient("results/{expert}/base_model"),
        training="results/{expert}/training.json",
        staging="results/{expert}/staging.json",
        checkpoint=ancient("results/{expert}/checkpoint"),
        sources=wf.source_records,
        shards=wf.document_shards,
        documents=ancient(files_of(wf.document_shards, ".arrow")),
        keep="results/{expert}/keep.arrow",
        rows=ancient("results/{expert}/packed"),
        artefacts=ancient(wf.artefacts),
    output:
        record="results/{expert}/evaluation.json",
        answers="results/{expert}/answers.jsonl",
    log:
        "results/{expert}/logs/evaluate_expert.log",
    priority: 10
    conda:
        "../../envs/expertflow.yaml"
    threads: 2
    resources:
        gpu=1,
    params:
        spec=wf.spec("evaluate_expert"),
        code=wf.code("evaluate_expert"),
    shell:
        'python "$EXPERTFLOW"/evaluate_expert.py --spec {params.spec:q} --code {params.code}'
        " --plan {input.plan:q} --packing {input.packing:q} --model {input.model:q}"
        " --training {input.training:q} --checkpoint {input.checkpoint:q}"
        " --shards {input.shards:q} --keep {input.keep:q} --rows {input.rows:q}"
        " --staging {input.staging:q} --state state/.evaluations"
        " --answers {output.answers:q} --output {output.record:q} 2> {log:q}"


rule export_model:
    input:
        datasets="results/{expert}/datasets.json",
        model="results/{expert}/model.json",
        base=ancient("results/{expert}/base_model"),
        plan="results/{expert}/plan.json",
        training="results/{expert}/training.json",
        monitor="results/{expert}/monitor.json",
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
    threads: 4
    params:
        spec=wf.spec("export_model"),
        code=wf.code("export_model"),
    shell:
        'python "$EXPERTFLOW"/export_model.py --spec {params.spec:q} --code {params.code}'
        " --datasets {input.datasets:q} --model {input.model:q} --plan {input.plan:q}"
        " --training {input.training:q} --monitor {input.monitor:q}"
        " --evaluation {input.evaluation:q} --checkpoint {input.checkpoint:q} --rows {input.rows:q}"
        " --directory {output.directory:q} --output {output.record:q} 2> {log:q}"
