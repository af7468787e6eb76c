"""From records to the receipt.

Needs:  every record of an expert
Makes:  results/{expert}/report.json and report.html
        results/index.json and index.html      all configured experts side by side

The page is also part of `snakemake --report report.zip`.
"""

# How Snakemake's own report shows the page.
PAGE = {"caption": "../report/receipt.rst", "category": "Experts", "labels": {"expert": "{expert}"}}


rule build_report:
    input:
        **wf.files("(datasets) (documents) (model) (packing) (plan) (staging) (training) (monitor)"),
        **wf.files("(evaluation) (export) (steps) (gpu) (preflight) (profile/)"),
        ablation=wf.ablation,
    output:
        **wf.outputs("build_report", html=lambda path: report(path, **PAGE)),
    log:
        wf.log("build_report"),
    localrule: True
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("build_report", "html results=results/{expert} ledger=state/.guard/ledger.json"),
    shell:
        wf.command("build_report")


rule compare_experts:
    input:
        reports=expand("results/{expert}/report.json", expert=wf.experts),
    output:
        **wf.outputs("compare_experts"),
    log:
        wf.log("compare_experts"),
    localrule: True
    conda:
        "../../envs/expertflow.yaml"
    params:
        code=wf.code("compare_experts"),
    shell:
        'python "$EXPERTFLOW"/compare_experts.py --spec {{}} --code {params.code} --reports'
        " {input.reports:q} --output {output.record:q} --html {output.html:q}"
        " --files {output.html:q} 2> {log:q}"
