"""What every switch is worth on this machine, next to the claims; only on request.

Needs:  results/{expert}/plan.json, packing.json, model.json; the hardware that will train
Makes:  results/{expert}/ablation/{variant}.json   one variant against the plan, in pairs of runs
        results/{expert}/ablation.json and .html   all of them, and the ledger of claims
"""


rule ablate_variant:
    input:
        **wf.files("plan packing model rows=packed/ (base_model/)"),
        **wf.shards(wf.variant_shards, ".arrow"),
        keep=wf.variant_keep,
        staging=wf.variant_staging,
    output:
        **wf.outputs("ablate_variant"),
    log:
        wf.log("ablate_variant"),
    priority: wf.priority("ablate_variant")
    conda:
        "../../envs/expertflow.yaml"
    threads: wf.threads
    resources:
        gpu=1,
    params:
        **wf.params("ablate_variant", "scratch=results/{expert}/.ablation.{variant}"),
    shell:
        wf.command("ablate_variant", on_card=True)


rule ablate_expert:
    input:
        **wf.files("plan model"),
        variants=wf.variants,
    output:
        **wf.outputs("ablate_expert"),
    log:
        wf.log("ablate_expert"),
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("ablate_expert", "html"),
    shell:
        wf.command("ablate_expert")
