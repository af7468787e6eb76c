"""What other trainers call our settings; docs/migration.md tells the whole story.

The new name is below the object that held the old one: ``training.lora_r`` is ``training.lora.r``.
"""

FORMER_NAMES = {
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "max_length": "max_seq_length",
    "num_workers": "dataloader_num_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "persistent_workers": "dataloader_persistent_workers",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "tf32": "use_tf32",
    "attn_implementation": "attention",
    "packing_strategy": "packing",
    "early_stopping_patience": "patience",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets",
    "use_dora": "lora.use_dora",
    "use_rslora": "lora.use_rslora",
    "dataset_text_field": "text",
    "model_name_or_path": "model",
    "chat_template_path": "chat_template",
    "license": "licence",
}

# Settings that are gone, or that other trainers have, by their full keys, and what to do instead.
DROPPED = {
    "training.dataloader_pin_memory": "batches are pinned wherever there is a card; leave it out",
    "training.deepspeed": "parallel: fsdp shares the model among the cards of world_size",
    "evaluation.backend": "transformers writes the answers; leave it out",
    "export.gguf": "leave it out; llama.cpp converts merged/ itself (docs/exporting.md)",
    "scratch_quota_gib": "copies have no quota; leave it out, and remove old ones by make prune",
}
