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
        **wf.shards(wf.tokenizer_shards, ".arrow"),
        keep=wf.tokenizer_keep,
    output:
        **wf.outputs("prepare_tokenizer"),
    log:
        wf.log("prepare_tokenizer"),
    priority: wf.priority("prepare_tokenizer")
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("prepare_tokenizer", "directory"),
    shell:
        wf.command("prepare_tokenizer")


rule prepare_model:
    input:
        **wf.files("tokenizer (tokenizer/)"),
    output:
        **wf.outputs("prepare_model"),
    log:
        wf.log("prepare_model"),
    priority: wf.priority("prepare_model")
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("prepare_model", "directory"),
    shell:
        wf.command("prepare_model")


rule pretokenize_shard:
    input:
        **wf.shards(wf.shards_to_tokenize, ".arrow"),
        **wf.files("tokenizer (tokenizer/)"),
    output:
        **wf.outputs("pretokenize_shard"),
    log:
        wf.log("pretokenize_shard"),
    conda:
        "../../envs/expertflow.yaml"
    threads: 4
    params:
        **wf.params("pretokenize_shard", "name=shard ids index store=state/.tokens"),
    shell:
        wf.command(
            "pretokenize_shard", environment="MALLOC_ARENA_MAX=1 RAYON_NUM_THREADS={threads}"
        )


rule pack_sequences:
    input:
        **wf.shards(wf.token_shards, ".ids", ".arrow"),
        **wf.files("keep"),
    output:
        **wf.outputs("pack_sequences"),
    log:
        wf.log("pack_sequences"),
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("pack_sequences", "expert directory"),
    shell:
        wf.command("pack_sequences")
