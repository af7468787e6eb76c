"""From documents to packed rows.

Needs:  results/{expert}/documents/… and keep.arrow; a base model on the hub, in a folder, or builtin
Makes:  results/{expert}/tokenizer.json        tokenizer and layout of chats; files in tokenizer/
        results/{expert}/model.json            base model, with hashes; nothing here waits for it
        results/{expert}/tokens/…              token ids of all documents, by shard
        results/{expert}/packing.json          row length, fill, what was cut; rows in packed/
        state/.tokens/…                         undeclared: tokens by content, for every expert
"""


rule prepare_tokenizer:
    input:
        shards=wf.tokenizer_shards,
        keep=wf.tokenizer_keep,
        documents=ancient(files_of(wf.tokenizer_shards, ".arrow")),
    output:
        record="results/{expert}/tokenizer.json",
        directory=directory("results/{expert}/tokenizer"),
    log:
        "results/{expert}/logs/prepare_tokenizer.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("prepare_tokenizer"),
        code=wf.code("prepare_tokenizer"),
        documents=lambda w, input: (
            ["--shards", *input.shards, "--keep", *input.keep] if input.keep else []
        ),
    shell:
        'python "$EXPERTFLOW"/prepare_tokenizer.py --spec {params.spec:q} --code {params.code}'
        " {params.documents:q} --directory {output.directory:q} --output {output.record:q}"
        " 2> {log:q}"


rule prepare_model:
    input:
        tokenizer="results/{expert}/tokenizer.json",
        files=ancient("results/{expert}/tokenizer"),
    output:
        record="results/{expert}/model.json",
        directory=directory("results/{expert}/base_model"),
    log:
        "results/{expert}/logs/prepare_model.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("prepare_model"),
        code=wf.code("prepare_model"),
    shell:
        'python "$EXPERTFLOW"/prepare_model.py --spec {params.spec:q} --code {params.code}'
        " --tokenizer {input.tokenizer:q} --directory {output.directory:q}"
        " --output {output.record:q} 2> {log:q}"


rule pretokenize_shard:
    input:
        shards=wf.shards_to_tokenize,
        documents=ancient(files_of(wf.shards_to_tokenize, ".arrow")),
        tokenizer="results/{expert}/tokenizer.json",
        files=ancient("results/{expert}/tokenizer"),
    output:
        record="results/{expert}/tokens/{source}/{shard}.json",
        ids="results/{expert}/tokens/{source}/{shard}.ids",
        index="results/{expert}/tokens/{source}/{shard}.arrow",
    log:
        "results/{expert}/logs/pretokenize_shard.{source}.{shard}.log",
    conda:
        "../../envs/expertflow.yaml"
    threads: 4
    params:
        spec=wf.spec("pretokenize_shard"),
        code=wf.code("pretokenize_shard"),
    shell:
        'MALLOC_ARENA_MAX=1 RAYON_NUM_THREADS={threads} python "$EXPERTFLOW"/pretokenize_shard.py'
        " --spec {params.spec:q} --code {params.code} --name {wildcards.shard} --shards {input.shards:q}"
        " --tokenizer {input.tokenizer:q} --store state/.tokens --ids {output.ids:q}"
        " --index {output.index:q} --output {output.record:q} 2> {log:q}"


rule pack_sequences:
    input:
        shards=wf.token_shards,
        tokens=ancient(files_of(wf.token_shards, ".ids", ".arrow")),
        keep="results/{expert}/keep.arrow",
    output:
        record="results/{expert}/packing.json",
        directory=directory("results/{expert}/packed"),
    log:
        "results/{expert}/logs/pack_sequences.log",
    conda:
        "../../envs/expertflow.yaml"
    params:
        spec=wf.spec("pack_sequences"),
        code=wf.code("pack_sequences"),
    shell:
        'python "$EXPERTFLOW"/pack_sequences.py --spec {params.spec:q} --code {params.code}'
        " --expert {wildcards.expert:q} --shards {input.shards:q} --keep {input.keep:q}"
        " --directory {output.directory:q} --output {output.record:q} 2> {log:q}"
