"""What a model card says of the run: data, settings, what it took, and what it was made from."""

from expertflow.data.records import DatasetSource
from expertflow.export.card_inputs import CardInputs
from expertflow.export.card_text import code, plain, table
from expertflow.export.licences import remarks
from expertflow.plan.cost import billed_hours

NOT_STATED = "**not stated**"
JOULES_PER_KWH = 3.6e6


def data_lines(inputs: CardInputs) -> list[str]:
    """Give the table of sources with their licences."""
    sources, ids = inputs.datasets.sources, inputs.spec.hub_datasets
    notes = [f"{source.name}: {note}" for source in sources for note in source.notes]
    said = [*notes, *remarks(inputs.made_from)]
    return [
        "## Data",
        "",
        *table(
            ("source", "licence", "records", "revision", "SHA-256"),
            (_source_row(source, ids.get(source.name)) for source in sources),
        ),
        *(f"- {plain(line)}" for line in said),
        *([""] if said else []),
    ]


def _source_row(source: DatasetSource, hub_id: str | None) -> tuple[str, ...]:
    name = plain(source.name) + (f" ({plain(hub_id)})" if hub_id else f", {source.kind}")
    return (
        name,
        NOT_STATED if source.licence is None else plain(source.licence),
        "not counted" if source.n_records is None else f"{source.n_records:,}",
        "-" if source.revision is None else plain(source.revision),
        code(source.sha256[:16]),
    )


def settings_lines(inputs: CardInputs) -> list[str]:
    """Give the settings that decide what was learned."""
    plan, training, lora = inputs.plan, inputs.training, inputs.plan.lora
    rows = [
        ("method", plan.method),
        ("steps, epochs", f"{training.n_steps:,}, {training.n_epochs:.2f}"),
        (
            "sequences a step, of tokens",
            f"{plan.global_batch_sequences}, {plan.sequence_length_tokens:,}",
        ),
        (
            "learning rate, schedule, warm-up steps",
            f"{plan.learning_rate:g}, {plan.lr_scheduler_type}, {plan.n_warmup_steps}",
        ),
        ("optimiser, weight decay", f"{plan.optim}, {plan.weight_decay:g}"),
        ("precision", plan.precision),
        ("seed", str(plan.seed)),
        (
            "tokens, of which learned",
            f"{training.n_tokens:,}, {training.n_target_tokens:,}",
        ),
    ]
    if lora is not None:
        kind = "DoRA" if lora.use_dora else "LoRA"
        scale = ", rank-stabilised" if lora.use_rslora else ""
        words = f"r {lora.r}, alpha {lora.alpha}, dropout {lora.dropout:g}{scale}"
        rows.insert(1, (f"{kind} on {', '.join(lora.targets)}", words))
    shown = ((plain(name), plain(value)) for name, value in rows)
    return ["## Training", "", *table(("setting", "value"), shown)]


def cost_lines(inputs: CardInputs) -> list[str]:
    """Say what training took, and on what; what was not measured has its reason."""
    training = inputs.training
    cards = training.gpu_name or training.device
    several = f"{training.world_size} x " if training.world_size > 1 else ""
    return [
        "## What training took",
        "",
        *table(
            ("", ""),
            (
                ("hardware", f"{several}{plain(cards)}"),
                ("wall time", f"{training.time.wall_s / 3600:.3g} h"),
                ("energy of the cards", _energy(inputs)),
                ("cost", _cost(inputs)),
            ),
        ),
    ]


def _energy(inputs: CardInputs) -> str:
    """Give the cards' energy; the host's own has no counter."""
    name = "energy_all_j" if inputs.training.world_size > 1 else "energy_j"
    energy_j = getattr(inputs.monitor, name)
    if energy_j is None:
        reason = inputs.monitor.unavailable.get(name, "the monitor did not record it")
        return f"not measured: {plain(reason)}"
    made_up = ", a made-up reading" if inputs.monitor.simulated else ""
    return f"{energy_j / JOULES_PER_KWH:.4g} kWh{made_up}"


def _cost(inputs: CardInputs) -> str:
    cost, hours = inputs.plan.cost, inputs.training.time.wall_s / 3600
    if cost.price_usd_per_hour is None:
        return "not known: no price per hour is configured for this hardware"
    usd = cost.price_usd_per_hour * billed_hours(hours, cost.billing_minutes)
    dated = f" as of {plain(cost.price_as_of)}" if cost.price_as_of else ""
    return f"${usd:.2f} at ${cost.price_usd_per_hour:g} an hour{dated}"


def provenance_lines(inputs: CardInputs, *, weights_sha256: str) -> list[str]:
    """Give the hashes by which a run is known, and the versions of what ran."""
    training, model = inputs.training, inputs.model
    hashes = {
        "files of this folder (weights)": weights_sha256,
        "trained parameters": inputs.evaluation.published.weights_sha256,
        "weights of the base model": model.weights_sha256,
        "tokenizer": model.tokenizer_sha256,
        "packed rows": training.packing_sha256,
        "code of the export": inputs.code,
        "the training's settings, rows, base and code": training.fingerprint,
    }
    versions = ", ".join(f"{name} {value}" for name, value in sorted(training.versions.items()))
    return [
        "## Provenance",
        "",
        *table(("what", "hash"), ((what, code(value)) for what, value in hashes.items())),
        f"Versions: {plain(versions)}.",
        "",
    ]
