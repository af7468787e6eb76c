"""The fastest settings of a step on this machine, searched where a manifest or a user asks for it.

Needs:  results/{expert}/packing.json, model.json; the hardware that will train
Makes:  results/{expert}/tuning.json           what was tried, what is fastest, and its gain
        state/.tuning/…                        undeclared: trials, for other experts of the kind
"""


rule tune_expert:
    input:
        packing="results/{expert}/packing.json",
        model="results/{expert}/model.json",
        rows=ancient("results/{expert}/packed"),
        base=ancient("results/{expert}/base_model"),
    output:
        "results/{expert}/tuning.json",
    log:
        "results/{expert}/logs/tune_expert.log",
    priority: 10
    conda:
        "../../envs/expertflow.yaml"
    threads: 2
    resources:
        gpu=1,
    params:
        spec=wf.spec("tune_expert"),
        code=wf.code("tune_expert"),
    shell:
        'exec python "$EXPERTFLOW"/tune_expert.py --spec {params.spec:q} --code {params.code}'
        " --expert {wildcards.expert:q} --packing {input.packing:q} --model {input.model:q}"
        " --rows {input.rows:q} --scratch results/{wildcards.expert:q}/.tuning"
        " --cache state/.tuning --output {output:q} 2> {log:q}"
