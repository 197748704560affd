"""What transformers, TRL, axolotl, LLaMA-Factory, torchtitan, Megatron-LM and DeepSpeed call the
keys of a job. `docs/tasks/coming_from.md` has the same table."""
# ruff: noqa: E501

from __future__ import annotations

import difflib
from typing import Any

_SHOWN, _LOOKED_AT = 3, 100
_TABLE = """
gradient_accumulation_steps gradient_accumulation accumulate_grad_batches = pipeline.microbatches
per_device_train_batch_size micro_batch_size_per_gpu train_micro_batch_size_per_gpu local_batch_size = train.micro_batch_size
batch_size global_batch_size train_batch_size total_batch_size = train.global_batch | rows of a step, of all replicas; or {tokens: …}
num_train_epochs num_epochs max_epochs = train.epochs | in place of train.steps
max_steps train_iters num_train_steps total_steps training_steps max_iters = train.steps
learning_rate max_lr peak_lr = train.optimizer.lr
lr_scheduler_type lr_scheduler scheduler lr_decay_style decay_type = train.lr_schedule.kind | cosine, linear, constant or wsd (warmup_stable_decay)
warmup_steps num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_iters warmup_num_steps = train.lr_schedule.warmup_steps
warmup_ratio warmup_fraction lr_warmup_fraction warmup_proportion = train.lr_schedule.warmup_ratio
lr_decay_iters lr_decay_steps num_decay_steps wsd_decay_steps lr_wsd_decay_iters = train.lr_schedule.decay_steps | without the warm-up
min_lr min_lr_ratio min_lr_rate min_lr_factor cosine_min_lr_ratio = train.lr_schedule.min_ratio | the least rate divided by the largest
optim optimizer_type optimizer_name = train.optimizer.kind | adamw_torch is adamw; adamw_8bit is adamw with state: 8bit
loraplus_lr_ratio embedding_lr embedding_lr_scale decoupled_lr lr_groups param_groups = train.optimizer.groups | as [{match: lora_B, lr_factor: 16}]
adam_beta1 adam_beta2 beta1 beta2 = train.optimizer.betas | a list of both
adam_epsilon adam_eps = train.optimizer.eps
max_grad_norm clip_grad clip_grad_norm gradient_clipping gradient_clip_val grad_clip = train.clip_norm
bf16 mixed_precision precision dtype torch_dtype params_dtype model_dtype = train.precision | bf16 (mixed), bf16_pure or fp32
fp16 half = train.precision | fp16
loss_scale initial_scale_power init_scale loss_scale_window growth_interval = train.loss_scale | as {init: 65536, growth_interval: 2000}
fp8 fp8_format float8 = train.precision | as fp8
gradient_checkpointing use_gradient_checkpointing activation_checkpoint recompute_activations recompute_granularity = train.activation_checkpointing | full for true; selective is quicker
torch_compile use_compile = train.compile
attn_implementation flash_attention flash_attn use_flash_attn use_flash_attention_2 sdp_attention = train.attention | auto takes the quickest that is there
max_length max_seq_length max_seq_len cutoff_len sequence_len sequence_length seq_length block_size = data.seq_len ; sample_packing neat_packing = data.packing
train_on_inputs train_on_prompt mask_prompt assistant_only_loss completion_only_loss = data.loss | assistant, last or all
dataset datasets dataset_name dataset_path data_path dataset_dir train_file train_files = data.path | a file, a folder, a glob, s3://…; with kind: hf org/name
dataset_text_field text_column text_field = data.text_key
val_set_size val_size validation_split test_size = data.eval.fraction | a share of the documents
eval_steps eval_interval val_check_interval = train.eval_every_steps
template chat_template_jinja = data.chat_template | a file with a Jinja template
tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_model tokenizer_config = data.tokenizer | a tokenizer.json or its folder
tokens special_tokens add_tokens add_special_tokens new_special_tokens additional_special_tokens = data.added_tokens | a list, special unless {text: …, special: false}
model_name_or_path model_name model_path model_id base_model pretrained_model_name_or_path hf_assets_path = model.from_hf | a folder, or s3://…
num_hidden_layers n_layers n_layer = model.num_layers ; n_embd d_model = model.hidden_size ; intermediate_size ffn_hidden_size ffn_dim d_ff n_inner = model.ffn_size
num_attention_heads n_heads n_head = model.num_heads ; num_key_value_heads num_query_groups n_kv_heads = model.num_kv_heads ; kv_channels = model.head_dim ; max_position_embeddings = model.max_context
rms_norm_eps layer_norm_eps layernorm_epsilon norm_epsilon = model.norm_eps ; tie_word_embeddings = model.tie_embeddings
rope_scaling = model.rope | with rope_type as kind, original_max_position_embeddings as original_context
initializer_range init_method_std = model.init_std
adapter finetuning_type peft use_lora use_peft = model.lora | a section: {rank: 16, alpha: 32}
lora_r lora_rank r = model.lora.rank ; lora_alpha = model.lora.alpha ; lora_dropout = model.lora.dropout
target_modules lora_target lora_target_modules lora_target_linear = model.lora.targets | a list of names; all is [all-linear]
modules_to_save lora_modules_to_save additional_target = model.lora.also_train | embed_tokens, lm_head, norms
load_in_4bit load_in_8bit quantization_bit = model.lora.base | nf4 or int8
num_local_experts n_routed_experts = model.num_experts ; num_experts_per_tok moe_router_topk = model.experts_per_token ; moe_intermediate_size moe_ffn_hidden_size = model.expert_ffn_size
router_aux_loss_coef moe_aux_loss_coeff = model.aux_loss_weight
pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp_size = mesh.pp
dp dp_size data_parallel_size data_parallel_replicate_degree num_gpus world_size = mesh.dp_replicate | ranks with a whole copy of the weights
fsdp_size dp_shard data_parallel_shard_degree zero_stage zero_optimization fsdp_config deepspeed = mesh.fsdp | the number of ranks that share weights and moments, as with ZeRO-3
context_parallel_size context_parallel_degree sequence_parallel_degree sequence_parallel_size = mesh.cp ; expert_parallel_size expert_model_parallel_size expert_parallel_degree = mesh.ep
tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree = mesh.fsdp | ! raypp has no tensor parallelism yet: share weights by mesh.fsdp, layers by mesh.pp, long rows by mesh.cp
pipeline_parallel_schedule = pipeline.schedule
num_layers_per_virtual_pipeline_stage = pipeline.layers_per_stage | a list
load_best_model_at_end metric_for_best_model save_best save_best_model save_top_k = checkpoint.best | as {keep: 1}; then `raypp checkpoints export --best`
save_steps save_interval save_freq checkpoint_interval = checkpoint.every_steps ; save_total_limit keep_latest_k = checkpoint.keep
output_dir save_dir save_folder dump_folder checkpoint_dir = checkpoint.url | a folder that all nodes share, or s3://…; the run's name is added
report_to wandb_project use_wandb enable_wandb use_tensorboard = observe.trackers | [{kind: wandb}], or tensorboard
run_name experiment_name exp_name = name
ddp_timeout = recovery.hang_timeout_s
use_cpu no_cuda = resources.device | cpu
resume_from_checkpoint load_checkpoint = checkpoint.url | ! leave it out: `raypp submit JOB --resume` continues from the newest checkpoint
logging_steps log_interval log_freq = observe | ! leave it out: raypp records every step
num_workers dataloader_num_workers dataset_num_proc preprocessing_num_workers = data | ! leave it out: raypp reads ahead by itself; `raypp data tokenize --processes N` tokenises once
num_nodes nnodes nproc_per_node devices num_gpus_per_node = mesh | ! leave it out: the product of the axes of mesh is the number of GPUs
"""
"""Each: names = our key | how its value translates, where it is not the same; with `!` what
to do instead."""


def other_names() -> dict[str, tuple[str, str]]:
    """Returns our key for each name, and how the value translates; "" where it is the same."""
    names: dict[str, tuple[str, str]] = {}
    for line in _TABLE.strip().replace(" ; ", "\n").splitlines():
        theirs, _, ours = line.partition(" = ")
        key, _, how = ours.partition(" | ")
        names |= dict.fromkeys(theirs.split(), (key, how))
    return names


def translated(name: str) -> str:
    """Returns what to write for another trainer's name; "" if it is none."""
    names = other_names()
    close = difflib.get_close_matches(name.lower().replace("-", "_"), names, n=1, cutoff=0.9)
    if not close:
        return ""
    key, how = names[close[0]]
    return how[2:] if how.startswith("! ") else f"write {key}: {how or 'the same value'}"


def translated_section(value: Any) -> str:
    """Returns what to write for names in a section of another trainer; "" if it has none."""
    names = [str(name) for name in value] if isinstance(value, dict) else []
    found = [f"for {name} {words}" for name in names[:_LOOKED_AT] if (words := translated(name))]
    return "; ".join(found[:_SHOWN])
