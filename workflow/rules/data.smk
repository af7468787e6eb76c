"""From sources to documents.

Needs:  the sources that an expert's manifest names
Makes:  results/{expert}/datasets.json         sources, licences, shards
        results/{expert}/documents/…           rendered documents and rejects, by shard
        results/{expert}/documents.json        counts; keep.arrow says which stay, and where
"""


rule fetch_source:
    input:
        lock=wf.source_lock,
    output:
        record="results/{expert}/sources/fetched/{source}.json",
    log:
        "results/{expert}/logs/fetch_source.{source}.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("fetch_source"),
        code=wf.code("fetch_source"),
        directory=lambda w, output: output.record.removesuffix(".json"),
    shell:
        'python "$EXPERTFLOW"/fetch_source.py --spec {params.spec:q} --code {params.code}'
        " --lock {input.lock:q} --directory {params.directory:q} --output {output.record:q}"
        " 2> {log:q}"


rule generate_source:
    input:
        lock=wf.source_lock,
    output:
        record="results/{expert}/sources/generated/{source}.json",
        directory=directory("results/{expert}/sources/generated/{source}"),
    log:
        "results/{expert}/logs/generate_source.{source}.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("generate_source"),
        code=wf.code("generate_source"),
    shell:
        'python "$EXPERTFLOW"/generate_source.py --spec {params.spec:q} --code {params.code}'
        " --lock {input.lock:q} --directory {output.directory:q} --output {output.record:q}"
        " 2> {log:q}"


rule find_datasets:
    input:
        lock=wf.lock,
        sources=wf.source_records,
    output:
        "results/{expert}/datasets.json",
    log:
        "results/{expert}/logs/find_datasets.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("find_datasets"),
        code=wf.code("find_datasets"),
    shell:
        'python "$EXPERTFLOW"/find_datasets.py --spec {params.spec:q} --code {params.code}'
        " --lock {input.lock:q} --sources {input.sources:q} --output {output:q} 2> {log:q}"


rule prepare_shard:
    input:
        source=wf.source_record,
        data=ancient(wf.source_data),
        benchmarks=ancient(wf.benchmarks),
    output:
        record="results/{expert}/documents/{source}/{shard}.json",
        documents="results/{expert}/documents/{source}/{shard}.arrow",
        rejected="results/{expert}/documents/{source}/{shard}.rejected.jsonl",
    log:
        "results/{expert}/logs/prepare_shard.{source}.{shard}.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("prepare_shard"),
        code=wf.code("prepare_shard"),
    shell:
        'python "$EXPERTFLOW"/prepare_shard.py --spec {params.spec:q} --code {params.code}'
        " --source {input.source:q} --shard {wildcards.shard}"
        " --documents {output.documents:q} --rejected {output.rejected:q}"
        " --output {output.record:q} 2> {log:q}"


rule deduplicate_documents:
    input:
        shards=wf.document_shards,
        documents=ancient(files_of(wf.document_shards, ".arrow")),
    output:
        record="results/{expert}/documents.json",
        keep="results/{expert}/keep.arrow",
    log:
        "results/{expert}/logs/deduplicate_documents.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("deduplicate_documents"),
        code=wf.code("deduplicate_documents"),
    shell:
        'python "$EXPERTFLOW"/deduplicate_documents.py --spec {params.spec:q} --code {params.code}'
        " --expert {wildcards.expert:q} --shards {input.shards:q} --keep {output.keep:q}"
        " --output {output.record:q} 2> {log:q}"
