"""Everything that a GPU machine needs from staging to the report, as one verified file.

Needs:  plan, packed rows, model and documents of an expert
Makes:  results/{expert}/bundle.tar            opened there with workflow/scripts/open_bundle.py
"""


rule make_bundle:
    input:
        **wf.files("(datasets) (documents) (keep) (tokenizer) (model) (packing) (plan)"),
        **wf.files("(references) (packed/) (tokenizer/) (base_model/)"),
        **wf.shards(wf.document_shards, ".arrow", needed=True),
        **wf.artifacts,
        needs_lock=wf.lock,
        needs_tokens=wf.token_shards,
        needs_calibration=wf.calibration,
    output:
        **wf.outputs("make_bundle"),
    log:
        wf.log("make_bundle"),
    priority: wf.priority("make_bundle")
    conda:
        "../../envs/expertflow.yaml"
    params:
        **wf.params("make_bundle"),
    shell:
        wf.command("make_bundle", "2> >(tee {log:q} >&2)")
