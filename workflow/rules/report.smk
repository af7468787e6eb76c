"""From records to the receipt.

Needs:  every record of an expert
Makes:  results/{expert}/report.json and report.html
        results/index.json and index.html      all configured experts side by side

The page is also carried by `snakemake --report report.zip`.
"""


rule build_report:
    input:
        datasets="results/{expert}/datasets.json",
        documents="results/{expert}/documents.json",
        model="results/{expert}/model.json",
        packing="results/{expert}/packing.json",
        plan="results/{expert}/plan.json",
        staging="results/{expert}/staging.json",
        training="results/{expert}/training.json",
        monitor="results/{expert}/monitor.json",
        evaluation="results/{expert}/evaluation.json",
        export="results/{expert}/export.json",
        steps="results/{expert}/steps.jsonl",
        gpu="results/{expert}/gpu.jsonl",
        preflight="results/{expert}/preflight.json",
        profile=ancient("results/{expert}/profile"),
        ablation=wf.ablation,
    output:
        json="results/{expert}/report.json",
        html=report(
            "results/{expert}/report.html",
            caption="../report/receipt.rst",
            category="Experts",
            labels={"expert": "{expert}"},
        ),
    log:
        "results/{expert}/logs/build_report.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("build_report"),
        code=wf.code("build_report"),
        ablation=lambda w, input: ["--ablation", *input.ablation] if input.ablation else [],
    shell:
        'python "$EXPERTFLOW"/build_report.py --spec {params.spec:q} --code {params.code}'
        " --results results/{wildcards.expert:q} {params.ablation:q} --json {output.json:q}"
        " --html {output.html:q}"
        " 2> {log:q}"


rule compare_experts:
    input:
        reports=expand("results/{expert}/report.json", expert=wf.experts),
    output:
        json="results/index.json",
        html="results/index.html",
    log:
        "results/logs/compare_experts.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        code=wf.code("compare_experts"),
    shell:
        'python "$EXPERTFLOW"/compare_experts.py --reports {input.reports:q}'
        " --json {output.json:q} --html {output.html:q} 2> {log:q}"
