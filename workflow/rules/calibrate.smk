"""What a few real steps take, measured before the plan if the configuration says so.

Needs:  results/{expert}/packing.json, model.json; the hardware that will train
Makes:  results/{expert}/calibration.json      seconds of a step, a save, an evaluation, and the rest
"""


rule calibrate_expert:
    input:
        **wf.files("packing model rows=packed/ (base_model/)"),
        tuning=wf.tuning,
    output:
        **wf.outputs("calibrate_expert"),
    log:
        wf.log("calibrate_expert"),
    priority: wf.priority("calibrate_expert", 10)
    conda:
        "../../envs/expertflow.yaml"
    threads: wf.threads
    resources:
        **wf.processes,
    params:
        **wf.params("calibrate_expert", "expert scratch=results/{expert}/.calibration"),
    shell:
        wf.command("calibrate_expert", on_card=True)
