"""Functions that rules share. They ask the house; nothing is decided here."""


def spec_of(rule):
    """Give the settings that a rule uses, as one canonical JSON text."""

    def spec(wildcards):
        guard.refuse_keep_incomplete(workflow.execution_settings)
        return house.spec(rule, wildcards)

    return spec


def lock_of(wildcards):
    return house.lock(wildcards.expert)


def source_record(wildcards):
    return house.source_record(wildcards.expert, wildcards.source)


def source_data(wildcards):
    return house.source_data(wildcards.expert, wildcards.source)


def benchmark_files(wildcards):
    return house.benchmarks(wildcards.expert)


def source_records(wildcards):
    return house.source_records(wildcards.expert)


def document_shards(wildcards):
    return house.shards(wildcards.expert, "documents")


def token_shards(wildcards):
    return house.shards(wildcards.expert, "tokens")


def document_files(wildcards):
    return house.arrow_files(wildcards.expert, "documents")


def token_files(wildcards):
    return house.arrow_files(wildcards.expert, "tokens")


def model_documents(wildcards):
    return document_files(wildcards) if model_keep(wildcards) else []


def model_shards(wildcards):
    return house.model_inputs(wildcards.expert)[0]


def model_keep(wildcards):
    return house.model_inputs(wildcards.expert)[1]


def artefacts_of(wildcards):
    return house.artefacts(wildcards.expert)
