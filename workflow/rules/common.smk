"""Functions that rules share. They ask the house; nothing is decided here."""


def spec_of(rule):
    """Give the settings that a rule uses, as one canonical JSON text."""

    def spec(wildcards):
        guard.refuse_keep_incomplete(workflow.execution_settings)
        return house.spec(rule, wildcards)

    return spec


def code_of(rule):
    """Return the digest of a rule's code once a job needs it: hashing all rules takes a while."""
    return lambda wildcards: house.code(rule)


def forecast_of(wildcards):
    """Say what a training should take, for the table of a dry run; null, no resource, elsewhere.

    Jobs of one group must agree on every text, so there it is left out, too.
    """
    if not workflow.output_settings.dryrun or workflow.group_settings.group_components:
        return None
    return house.forecast(wildcards.expert)


def gpus_of(wildcards):
    """Count the cards of all nodes together."""
    limit = workflow.global_resources.get("gpu")
    return allocation.n_gpus(house.expert(wildcards.expert)["training"], limit, main=house.main)


def minutes_of(wildcards):
    """Say how long a cluster should let a training run; nothing else reads it."""
    return allocation.runtime_minutes(wildcards.expert)


def nodes_of(wildcards):
    """Count the machines that train together; null, no resource, where it is one."""
    return allocation.n_nodes(house.expert(wildcards.expert)["training"])


def mpi_of(wildcards):
    """Name what starts a process on each of several machines."""
    return "srun" if nodes_of(wildcards) else None


def no_tasks_of(wildcards):
    """Keep the Slurm plugin from asking for ``tasks`` at every card, besides those in all."""
    return 0 if nodes_of(wildcards) else None


def files_of(records, *suffixes):
    """List the files behind the records of shards."""
    return [record.removesuffix(".json") + suffix for record in records for suffix in suffixes]


def lock_of(wildcards):
    return house.lock(wildcards.expert)


def source_lock(wildcards):
    return house.source_lock(wildcards.expert, wildcards.source)


def source_record(wildcards):
    return house.source_record(wildcards.expert, wildcards.source)


def source_data(wildcards):
    return house.source_data(wildcards.expert, wildcards.source)


def benchmark_files(wildcards):
    return house.benchmarks(wildcards.expert)


def source_records(wildcards):
    return house.source_records(wildcards.expert)


def document_shards(wildcards):
    return house.shards(wildcards.expert)


def token_shards(wildcards):
    return house.token_shards(wildcards.expert)


def shards_to_tokenise(wildcards):
    return house.shards_to_tokenise(wildcards.expert, wildcards.source, wildcards.shard)


def files_to_tokenise(wildcards):
    return files_of(shards_to_tokenise(wildcards), ".arrow")


def document_files(wildcards):
    return files_of(document_shards(wildcards), ".arrow")


def token_files(wildcards):
    return files_of(token_shards(wildcards), ".ids", ".arrow")


def model_documents(wildcards):
    return document_files(wildcards) if model_keep(wildcards) else []


def model_shards(wildcards):
    return house.model_inputs(wildcards.expert)[0]


def model_keep(wildcards):
    return house.model_inputs(wildcards.expert)[1]


def artefacts_of(wildcards):
    return house.artefacts(wildcards.expert)


def calibration_of(wildcards):
    """Give the calibration that the plan goes by, where one is asked for."""
    return house.calibration(wildcards.expert)


def variant_records(wildcards):
    return house.variants(wildcards.expert)


def variant_shards(wildcards):
    return house.variant_inputs(wildcards.expert, wildcards.variant)["shards"]


def variant_documents(wildcards):
    return files_of(variant_shards(wildcards), ".arrow")


def variant_keep(wildcards):
    return house.variant_inputs(wildcards.expert, wildcards.variant)["keep"]


def variant_staging(wildcards):
    return house.variant_inputs(wildcards.expert, wildcards.variant)["staging"]


def ablation_of(wildcards):
    """Give the ablation that the report shows, where one is asked for."""
    return house.ablation(wildcards.expert)


def tuning_of(wildcards):
    """Give the tuning whose settings the plan takes, where the manifest names one."""
    return house.tuned(wildcards.expert)
