"""From sources to documents.

Needs:  the sources that an expert's manifest names
Makes:  results/{expert}/datasets.json         sources, licenses, shards
        results/{expert}/documents/…           rendered documents and rejects, by shard
        results/{expert}/documents.json        counts; keep.arrow lists which stay, and where
"""


rule fetch_source:
    input:
        lock=wf.source_lock,
    output:
        **wf.outputs("fetch_source"),
    log:
        wf.log("fetch_source"),
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("fetch_source", "directory=results/{expert}/sources/fetched/{source}"),
    shell:
        wf.command("fetch_source")


rule generate_source:
    input:
        lock=wf.source_lock,
    output:
        **wf.outputs("generate_source"),
    log:
        wf.log("generate_source"),
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("generate_source", "directory"),
    shell:
        wf.command("generate_source")


rule find_datasets:
    input:
        sources=wf.source_records,
    output:
        **wf.outputs("find_datasets"),
    log:
        wf.log("find_datasets"),
    localrule: True
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("find_datasets"),
    shell:
        wf.command("find_datasets")


rule prepare_shard:
    input:
        source=wf.source_record,
        needs_data=ancient(wf.source_data),
        needs_benchmarks=ancient(wf.benchmarks),
    output:
        **wf.outputs("prepare_shard"),
    log:
        wf.log("prepare_shard"),
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("prepare_shard", "shard documents rejected"),
    shell:
        wf.command("prepare_shard")


rule deduplicate_documents:
    input:
        **wf.shards(wf.document_shards, ".arrow"),
    output:
        **wf.outputs("deduplicate_documents"),
    log:
        wf.log("deduplicate_documents"),
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("deduplicate_documents", "expert keep"),
    shell:
        wf.command("deduplicate_documents")
