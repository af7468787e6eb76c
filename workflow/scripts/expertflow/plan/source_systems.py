"""What the five hand-run set-ups that this project replaces had, by the letter of each.

A manifest names its set-up in ``system``, as ``"B: repository model, RTX 2060 6 GB"``. The values
are those of their scripts and logs; what none of them says is left out.
"""

from msgspec.structs import replace

from expertflow.plan.records import Reason

# Set-up A: four LoRA experts on an RTX 4090.
A = {
    "batch_size": "16",
    "gradient_accumulation_steps": "4",
    "gradient_checkpointing": "False",
    "sequence_length_tokens": "2048",
    "precision": "bf16",
    "dataloader_num_workers": "8",
    "dataloader_prefetch_factor": "8",
    "dataloader_persistent_workers": "True",
    "group_by_length": "True",
    "attention": "sdpa",
    "n_warmup_steps": "10% of the steps",
    "save_steps": "250",
    "collection_interval_seconds": "1 s",
}
# Set-up B: a repository model on an RTX 2060; its warm-up depends on the steps.
B = {
    "batch_size": "4 on a 6 GB card, by tiers of memory",
    "gradient_accumulation_steps": "2",
    "dataloader_num_workers": "physical cores // 2",
    "collection_interval_seconds": "5 s",
}
# Set-up C: chain of thought on an H100.
C = {
    "batch_size": "2",
    "gradient_accumulation_steps": "4",
    "gradient_checkpointing": "True",
    "sequence_length_tokens": "1536",
    "precision": "bf16",
    "dataloader_num_workers": "4",
    "dataloader_prefetch_factor": "4",
}
# Set-up D: 600k examples on an H100.
D = {
    "batch_size": "4",
    "gradient_accumulation_steps": "2",
    "dataloader_num_workers": "4",
    "save_steps": "2000",
    "torch_compile": "True",
}
# Set-up E: 25 examples on an RTX 4090.
E = {"loader": "a loop that waited for its data 83% of each batch"}
SYSTEMS = {"A": A, "B": B, "C": C, "D": D, "E": E}


def source_values(system: str | None, *, n_steps: int) -> dict[str, str]:
    """Give the values of the set-up that ``system`` names, by setting; none for an unknown one.

    >>> source_values("B: repository model", n_steps=66)["n_warmup_steps"]
    '10 = max(10, int(0.1 x 66))'
    """
    letter = (system or "").partition(":")[0].strip()
    values = dict(SYSTEMS.get(letter, {}))
    if letter == "B":
        steps = max(10, int(0.1 * n_steps))
        values["n_warmup_steps"] = f"{steps} = max(10, int(0.1 x {n_steps}))"
    return values


def with_source_values(
    reasons: list[Reason], system: str | None, *, n_steps: int
) -> tuple[Reason, ...]:
    """Add to each reason what the set-up that is replaced had there."""
    values = source_values(system, n_steps=n_steps)
    return tuple(
        reason
        if reason.source_value is not None
        else replace(reason, source_value=values.get(reason.setting))
        for reason in reasons
    )
