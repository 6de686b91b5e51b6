"""What we rely on in vLLM's layers, Qwen3.5 classes, weight mappers and loaders."""

from __future__ import annotations

from spark_vllm.check.row import Row
from spark_vllm.check.rules import Absent, Contains, Does, DoesNot, Exists, Inherits, Maps, Takes

LAYERS = "vllm.model_executor.layers"
MODELS = "vllm.model_executor.models"
LOADER = "vllm.model_executor.model_loader"

LAYER_ROWS = (
    Row(f"{LAYERS}.linear:LinearBase", Exists(), "only its layers are dispatched", "spark_inc.py"),
    Row(f"{LAYERS}.linear:UnquantizedLinearMethod", Exists(), "portable mode", "spark_inc.py"),
    Row(f"{LAYERS}.fused_moe:RoutedExperts", Exists(), "portable mode's experts", "spark_inc.py"),
    Row(f"{LAYERS}.fused_moe:UnquantizedFusedMoEMethod", Exists(), "portable mode", "spark_inc.py"),
    Row(
        f"{LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.__init__",
        Takes(("moe",)),
        "built for every expert layer in portable mode",
        "spark_inc.py",
    ),
    Row(
        f"{LAYERS}.fused_moe.config:FusedMoEConfig.__post_init__",
        Does(("self.intermediate_size_per_partition = self.intermediate_size // tp_size",)),
        "experts too narrow for the engine's order of scales are refused by it",
        "spark_inc.py",
    ),
    Row(
        f"{LAYERS}.fused_moe.routed_experts:RoutedExperts.__init__",
        Does(("self.moe_config = moe_config",)),
        "the experts' width on this device is read from it",
        "spark_inc.py",
    ),
    Row(
        f"{LAYERS}.vocab_parallel_embedding:ParallelLMHead",
        Inherits("VocabParallelEmbedding"),
        "the head asks for its method like an embedding",
        "spark_inc.py",
    ),
    Row(
        f"{LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding.__init__",
        Does(
            (
                "resolve_quant_method(quant_config, self, prefix=prefix)",
                "quant_method = UnquantizedEmbeddingMethod()",
            )
        ),
        "None from us is the plain head in portable mode",
        "spark_inc.py",
    ),
    Row(
        f"{LAYERS}.logits_processor:LogitsProcessor._apply_head",
        Takes(("lm_head", "hidden_states", "embedding_bias")),
        "every head computation goes through the method we or INC return",
        "spark_inc.py",
    ),
    Row(
        f"{LAYERS}.logits_processor:LogitsProcessor._apply_head",
        Does(("lm_head.quant_method.apply",)),
        "every head computation goes through the method we or INC return",
        "spark_inc.py",
    ),
    *(
        Row(
            f"{LAYERS}.logits_processor:LogitsProcessor.{name}",
            DoesNot(("quant_method.apply",)),
            "no second way around _apply_head",
            "spark_inc.py",
        )
        for name in ("forward", "get_top_tokens", "get_top_k_tokens")
    ),
    Row(
        f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.maybe_disable_tp",
        Does(("isinstance(quant_config, (AutoAWQConfig, AutoGPTQConfig, INCConfig))",)),
        "in_proj_ba is replicated under tensor parallelism for subclasses of INCConfig only",
        "spark_inc.py",
    ),
)

MODEL_ROWS = (
    Row(f"{MODELS}.utils:WeightsMapper", Exists(), "the overlay's renames", "spark_inc.py"),
    Row(f"{MODELS}.utils:WeightsMapper.orig_to_new_regex", Exists(), "our rules", "spark_inc.py"),
    Row(
        f"{MODELS}.utils:WeightsMapper.__or__", Takes(("other",)), "joined to INC's", "spark_inc.py"
    ),
    Row(
        f"{MODELS}.utils:WeightsMapper.apply_list", Takes(("values",)), "maps names", "spark_inc.py"
    ),
    Row(f"{MODELS}.utils:WeightsMapper.get_rename_mapper", Takes(), "maps names", "check/live.py"),
    Row(
        f"{MODELS}.utils:WeightsMapper._map_name_with_shard",
        Does(("pattern.search(key)", "pattern.sub(new_key, key)", "new_key is None")),
        "our rules are applied in order, and None drops a tensor",
        "checkpoint/names.py",
    ),
    Row(
        f"{MODELS}.utils:AutoWeightsLoader.load_weights",
        Does(("mapper |= quant_config.get_checkpoint_weight_mapper()",)),
        "the overlay's renames are taken from the config instance",
        "spark_inc.py",
    ),
    Row(
        f"{LOADER}.utils:configure_quant_config",
        Does(
            (
                "quant_config.apply_vllm_mapper(hf_to_vllm_mapper.get_rename_mapper())",
                "quant_config.packed_modules_mapping = packed_mapping",
            )
        ),
        "names and fusions reach our config before the layers are built",
        "spark_inc.py",
    ),
    Row(
        f"{MODELS}.qwen3_vl:Qwen3VLForConditionalGeneration.hf_to_vllm_mapper",
        Maps(
            (
                ("model.language_model.", "language_model.model."),
                ("lm_head.", "language_model.lm_head."),
            )
        ),
        "swapped modules are dispatched by the mapped name",
        "checkpoint/names.py",
    ),
    Row(
        f"{MODELS}.qwen3_vl:Qwen3VLForConditionalGeneration.packed_modules_mapping",
        Maps(
            (
                ("qkv_proj", ["q_proj", "k_proj", "v_proj"]),
                ("gate_up_proj", ["gate_proj", "up_proj"]),
            )
        ),
        "half-swapped modules are found before loading with the same fusions",
        "checkpoint/names.py",
    ),
    Row(
        f"{MODELS}.qwen3_5:Qwen3_5ForConditionalGeneration.packed_modules_mapping",
        Maps(
            (
                ("in_proj_qkvz", ["in_proj_qkv", "in_proj_z"]),
                ("in_proj_ba", ["in_proj_b", "in_proj_a"]),
            )
        ),
        "half-swapped modules are found before loading with the same fusions",
        "checkpoint/names.py",
    ),
    Row(
        f"{MODELS}.qwen3_5:Qwen3_5ForConditionalGeneration.hf_to_vllm_mapper",
        Maps((("mtp.", None),)),
        "the target drops the drafter's tensors",
        "checkpoint/gate.py",
    ),
    Row(
        f"{MODELS}.qwen3_5:Qwen3_5MoeForConditionalGeneration",
        Inherits("Qwen3_5ForConditionalGeneration"),
        "the model class of our checkpoints",
        "check/live.py",
    ),
    Row(
        f"{MODELS}.qwen3_5_mtp:Qwen3_5MoeMTP",
        Inherits("Qwen3_5MTP"),
        "the drafter's class",
        "checkpoint/gate.py",
    ),
    Row(
        f"{MODELS}.qwen3_5_mtp:Qwen3_5MTP.packed_modules_mapping",
        Maps((("gate_up_proj", ["gate_proj", "up_proj"]),)),
        "the drafter's fused modules are told apart from the target's",
        "spark_inc.py",
    ),
    Row(
        f"{MODELS}.qwen3_5_mtp:Qwen3_5MTP.has_own_lm_head",
        Absent(),
        "the drafter shares the target's head, INT8 or not",
        "checkpoint/gate.py",
    ),
    Row(
        f"{MODELS}.qwen3_5_mtp:Qwen3_5MTP.load_weights",
        Does(("name.startswith('mtp.')", "name.replace('mtp.', 'model.')")),
        "the drafter's tensors are found by this prefix",
        "checkpoint/gate.py",
    ),
    Row(
        f"{MODELS}.qwen3_5_mtp:Qwen3_5MTP.is_unused_checkpoint_weight",
        Takes(("name",)),
        "portable mode dequantises only what the drafter loads",
        "portable.py",
        versions=("0.32.0", "0.33.0"),
    ),
    Row(
        f"{MODELS}.registry:_SPECULATIVE_DECODING_MODELS",
        Contains("Qwen3_5MoeMTP"),
        "the drafter is found by this name",
        "checkpoint/gate.py",
    ),
    Row(
        "vllm.utils.deep_gemm:should_auto_disable_deep_gemm",
        Takes(("model_type",)),
        "DeepGEMM is left out for this model: CUTLASS computes the block-FP8 layers",
        "spark_inc.py",
    ),
    Row(
        "vllm.utils.deep_gemm:_DEEPGEMM_BLACKWELL_EXCLUDED_MODEL_TYPES",
        Contains("qwen3_5_moe_text"),
        "DeepGEMM is left out for this model: CUTLASS computes the block-FP8 layers",
        "spark_inc.py",
    ),
)

LOADER_ROWS = (
    Row(f"{LOADER}.base_loader:BaseModelLoader", Exists(), "our loader extends it", "portable.py"),
    Row(
        f"{LOADER}.base_loader:BaseModelLoader.__init__",
        Takes(("load_config",)),
        "the load format's class is built so",
        "portable.py",
    ),
    Row(
        f"{LOADER}.base_loader:BaseModelLoader.load_model",
        Takes(keywords=("vllm_config", "model_config", "prefix")),
        "overridden: it is where portable mode is entered",
        "portable.py",
    ),
    Row(
        f"{LOADER}.base_loader:BaseModelLoader.load_model",
        Does(("self.create_model", "self.load_weights(model, model_config)")),
        "the model is built after portable mode is entered, then we stream into it",
        "portable.py",
    ),
    Row(
        f"{LOADER}.base_loader:BaseModelLoader.load_model",
        Does(("process_weights_after_loading(model, model_config, target_device)",)),
        "wrapped: afterwards every number is as the kernels will read it",
        "finite.py",
    ),
    Row(
        f"{LOADER}:get_model",
        Does(("loader.load_model",)),
        "target and drafter are loaded through the wrapped method",
        "finite.py",
    ),
    Row(
        f"{LOADER}.base_loader:BaseModelLoader.load_weights",
        Takes(("model", "model_config")),
        "overridden: it streams the dequantised checkpoint",
        "portable.py",
    ),
    Row(
        f"{LOADER}.base_loader:BaseModelLoader.download_model",
        Takes(("model_config",)),
        "overridden: nothing to download",
        "portable.py",
    ),
    Row(
        f"{LOADER}:get_model_loader",
        Does(("_LOAD_FORMAT_TO_MODEL_LOADER[load_format](load_config)",)),
        "--load-format selects our loader",
        "portable.py",
    ),
    Row(
        f"{MODELS}.utils:WeightsMapper.apply_dict",
        Exists(),
        "INC maps its own keys",
        "spark_inc.py",
    ),
    Row("vllm.config:ModelConfig", Exists(), "annotates the loader", "portable.py"),
    Row("vllm.config:VllmConfig", Exists(), "annotates the loader", "portable.py"),
)

ROWS = (*LAYER_ROWS, *MODEL_ROWS, *LOADER_ROWS)
