"""The fastest settings of a step on this machine, searched if a manifest or a user asks for it.

Needs:  results/{expert}/packing.json, model.json; the hardware that will train
Makes:  results/{expert}/tuning.json           what was tried, what is fastest, and its gain
        state/.tuning/…                        undeclared: trials, for other experts of the kind
"""


rule tune_expert:
    input:
        **wf.files("packing model rows=packed/ (base_model/)"),
    output:
        **wf.outputs("tune_expert"),
    log:
        wf.log("tune_expert"),
    priority: wf.priority("tune_expert", 10)
    conda:
        "../../envs/expertflow.yaml"
    threads: wf.threads
    resources:
        gpu=1,
    params:
        **wf.params("tune_expert", "expert scratch=results/{expert}/.tuning cache=state/.tuning"),
    shell:
        wf.command("tune_expert", on_card=True)
