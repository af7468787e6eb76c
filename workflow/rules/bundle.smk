"""All that a GPU box needs from staging to the report, as one verified file.

Needs:  plan, packed rows, model and documents of an expert
Makes:  results/{expert}/bundle.tar            to be opened there by workflow/scripts/open_bundle.py
"""


rule make_bundle:
    input:
        lock=lock_of,
        sources=source_records,
        datasets="results/{expert}/datasets.json",
        shards=document_shards,
        texts=ancient(document_files),
        documents="results/{expert}/documents.json",
        keep="results/{expert}/keep.arrow",
        model="results/{expert}/model.json",
        base=ancient("results/{expert}/base_model"),
        tokens=token_shards,
        packing="results/{expert}/packing.json",
        rows=ancient("results/{expert}/packed"),
        calibration=calibration_of,
        plan="results/{expert}/plan.json",
        artefacts=ancient(artefacts_of),
    output:
        "results/{expert}/bundle.tar",
    log:
        "results/{expert}/logs/make_bundle.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=spec_of("make_bundle"),
        code=code_of("make_bundle"),
    shell:
        'python "$EXPERTFLOW"/make_bundle.py --spec {params.spec:q} --code {params.code}'
        " --output {output:q} 2> {log:q}"
