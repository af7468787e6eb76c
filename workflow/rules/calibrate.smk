"""What a few real steps take, measured before the plan, where the configuration says so.

Needs:  results/{expert}/packing.json, model.json; the hardware that will train
Makes:  results/{expert}/calibration.json      seconds of a step, a save, an evaluation, and the rest
"""


rule calibrate_expert:
    input:
        packing="results/{expert}/packing.json",
        model="results/{expert}/model.json",
        rows=ancient("results/{expert}/packed"),
        base=ancient("results/{expert}/base_model"),
        tuning=wf.tuning,
    output:
        "results/{expert}/calibration.json",
    log:
        "results/{expert}/logs/calibrate_expert.log",
    priority: 10
    conda:
        "../../envs/expertflow.yaml"
    threads: 2
    resources:
        gpu=wf.n_gpus,
        nodes=wf.n_nodes,
        tasks=wf.n_nodes,
        mpi=wf.mpi,
        tasks_per_gpu=wf.tasks_per_gpu,
    params:
        spec=wf.spec("calibrate_expert"),
        code=wf.code("calibrate_expert"),
        tuning=lambda w, input: ["--tuning", *input.tuning] if input.tuning else [],
    shell:
        'exec python "$EXPERTFLOW"/calibrate_expert.py --spec {params.spec:q} --code {params.code}'
        " --expert {wildcards.expert:q} --packing {input.packing:q} --model {input.model:q}"
        " --rows {input.rows:q} --scratch results/{wildcards.expert:q}/.calibration"
        " {params.tuning:q} --output {output:q} 2> {log:q}"
