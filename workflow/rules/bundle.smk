"""All that a GPU box needs from staging to the report, as one verified file.

Needs:  plan, packed rows, model and documents of an expert
Makes:  results/{expert}/bundle.tar            to be opened there by workflow/scripts/open_bundle.py
"""


rule make_bundle:
    input:
        lock=wf.lock,
        sources=wf.source_records,
        datasets="results/{expert}/datasets.json",
        shards=wf.document_shards,
        texts=ancient(files_of(wf.document_shards, ".arrow")),
        documents="results/{expert}/documents.json",
        keep="results/{expert}/keep.arrow",
        tokenizer="results/{expert}/tokenizer.json",
        files=ancient("results/{expert}/tokenizer"),
        model="results/{expert}/model.json",
        base=ancient("results/{expert}/base_model"),
        tokens=wf.token_shards,
        packing="results/{expert}/packing.json",
        rows=ancient("results/{expert}/packed"),
        calibration=wf.calibration,
        plan="results/{expert}/plan.json",
        artefacts=ancient(wf.artefacts),
    output:
        "results/{expert}/bundle.tar",
    log:
        "results/{expert}/logs/make_bundle.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("make_bundle"),
        code=wf.code("make_bundle"),
    shell:
        'python "$EXPERTFLOW"/make_bundle.py --spec {params.spec:q} --code {params.code}'
        " --output {output:q} 2> {log:q}"
