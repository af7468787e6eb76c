"""From sources to documents.

Needs:  the sources that an expert's manifest names
Makes:  results/{expert}/datasets.json         sources, licences, shards
        results/{expert}/documents/…           rendered documents and rejects, by shard
        results/{expert}/documents.json        counts; keep.arrow says which stay, and where
"""


rule fetch_source:
    input:
        lock=source_lock,
    output:
        record="results/{expert}/sources/fetched/{source}.json",
    log:
        "results/{expert}/logs/fetch_source.{source}.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=spec_of("fetch_source"),
        code=code_of("fetch_source"),
        directory=lambda w, output: output.record.removesuffix(".json"),
    shell:
        'python "$EXPERTFLOW"/fetch_source.py --spec {params.spec:q} --code {params.code}'
        " --lock {input.lock:q} --directory {params.directory:q} --output {output.record:q}"
        " 2> {log:q}"


rule generate_source:
    input:
        lock=source_lock,
    output:
        record="results/{expert}/sources/generated/{source}.json",
        directory=directory("results/{expert}/sources/generated/{source}"),
    log:
        "results/{expert}/logs/generate_source.{source}.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=spec_of("generate_source"),
        code=code_of("generate_source"),
    shell:
        'python "$EXPERTFLOW"/generate_source.py --spec {params.spec:q} --code {params.code}'
        " --lock {input.lock:q} --directory {output.directory:q} --output {output.record:q}"
        " 2> {log:q}"


rule find_datasets:
    input:
        lock=lock_of,
        sources=source_records,
    output:
        "results/{expert}/datasets.json",
    log:
        "results/{expert}/logs/find_datasets.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=spec_of("find_datasets"),
        code=code_of("find_datasets"),
    shell:
        'python "$EXPERTFLOW"/find_datasets.py --spec {params.spec:q} --code {params.code}'
        " --lock {input.lock:q} --sources {input.sources:q} --output {output:q} 2> {log:q}"


rule prepare_shard:
    input:
        source=source_record,
        data=ancient(source_data),
        benchmarks=ancient(benchmark_files),
    output:
        record="results/{expert}/documents/{source}/{shard}.json",
        documents="results/{expert}/documents/{source}/{shard}.arrow",
        rejected="results/{expert}/documents/{source}/{shard}.rejected.jsonl",
    log:
        "results/{expert}/logs/prepare_shard.{source}.{shard}.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=spec_of("prepare_shard"),
        code=code_of("prepare_shard"),
    shell:
        'python "$EXPERTFLOW"/prepare_shard.py --spec {params.spec:q} --code {params.code}'
        " --source {input.source:q} --shard {wildcards.shard}"
        " --documents {output.documents:q} --rejected {output.rejected:q}"
        " --output {output.record:q} 2> {log:q}"


rule deduplicate_documents:
    input:
        shards=document_shards,
        documents=ancient(document_files),
    output:
        record="results/{expert}/documents.json",
        keep="results/{expert}/keep.arrow",
    log:
        "results/{expert}/logs/deduplicate_documents.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=spec_of("deduplicate_documents"),
        code=code_of("deduplicate_documents"),
    shell:
        'python "$EXPERTFLOW"/deduplicate_documents.py --spec {params.spec:q} --code {params.code}'
        " --expert {wildcards.expert:q} --shards {input.shards:q} --keep {output.keep:q}"
        " --output {output.record:q} 2> {log:q}"
