"""What every switch is worth on this machine, beside what was claimed; only where asked for.

Needs:  results/{expert}/plan.json, packing.json, model.json; the hardware that will train
Makes:  results/{expert}/ablation/{variant}.json   one variant against the plan, in pairs of runs
        results/{expert}/ablation.json and .html   all of them, and the ledger of claims
"""


rule ablate_variant:
    input:
        plan="results/{expert}/plan.json",
        packing="results/{expert}/packing.json",
        model="results/{expert}/model.json",
        rows=ancient("results/{expert}/packed"),
        base=ancient("results/{expert}/base_model"),
        shards=wf.variant_shards,
        documents=ancient(files_of(wf.variant_shards, ".arrow")),
        keep=wf.variant_keep,
        staging=wf.variant_staging,
    output:
        "results/{expert}/ablation/{variant}.json",
    log:
        "results/{expert}/logs/ablate_variant/{variant}.log",
    wildcard_constraints:
        variant=r"[A-Za-z0-9_-]+",
    conda:
        "../../envs/expertflow.yaml"
    threads: 2
    resources:
        gpu=1,
    params:
        spec=wf.spec("ablate_variant"),
        code=wf.code("ablate_variant"),
        more=lambda w, input: [
            word
            for name in ("shards", "keep", "staging")
            if input.get(name)
            for word in (f"--{name}", *input.get(name))
        ],
    shell:
        'exec python "$EXPERTFLOW"/ablate_variant.py --spec {params.spec:q} --code {params.code}'
        " --plan {input.plan:q} --packing {input.packing:q}"
        " --model {input.model:q} --rows {input.rows:q} {params.more:q}"
        " --scratch results/{wildcards.expert:q}/.ablation.{wildcards.variant}"
        " --output {output:q} 2> {log:q}"


rule ablate_expert:
    input:
        plan="results/{expert}/plan.json",
        model="results/{expert}/model.json",
        variants=wf.variants,
    output:
        json="results/{expert}/ablation.json",
        html="results/{expert}/ablation.html",
    log:
        "results/{expert}/logs/ablate_expert.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("ablate_expert"),
        code=wf.code("ablate_expert"),
    shell:
        'python "$EXPERTFLOW"/ablate_expert.py --spec {params.spec:q} --code {params.code}'
        " --plan {input.plan:q} --model {input.model:q} --variants {input.variants:q}"
        " --json {output.json:q} --html {output.html:q} 2> {log:q}"
