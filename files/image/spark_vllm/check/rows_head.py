"""Rows of our own LM head: what it replaces, and the engine's kernels it is measured against."""

from __future__ import annotations

from spark_vllm.check.row import Row
from spark_vllm.check.rules import Does, Exists, Takes

EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
BASE = "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase"
HEAD = "head/method.py"
WAYS = "head/ways.py"
NVML = "vllm.third_party.pynvml"
MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils"

ROWS: tuple[Row, ...] = (
    Row(
        f"{EMBEDDING}:VocabParallelEmbedding.__init__",
        Does(
            (
                "self.embedding_dim = embedding_dim",
                "self.quant_method: QuantizeMethodBase = quant_method",
                "self.weight_loader",
            )
        ),
        "the head's method gets a loader, and is asked for finite logits of this width",
        "finite.py",
    ),
    Row(
        f"{EMBEDDING}:VocabParallelEmbedding.weight_loader",
        Does(("param[loaded_weight.shape[0]:].data.fill_(0)",)),
        "rows that pad the vocabulary are zero, not random, when the head is made INT8",
        HEAD,
    ),
    Row(
        f"{EMBEDDING}:ParallelLMHead.tie_weights",
        Does(("self.quant_method.tie_weights(self, embed_tokens)",)),
        "a head that is the embedding too is refused there",
        HEAD,
    ),
    Row(
        f"{BASE}.tie_weights",
        Takes(("layer", "embed_tokens")),
        "overridden: it refuses a head that is the embedding too",
        HEAD,
    ),
    Row(
        f"{BASE}.process_weights_after_loading",
        Takes(("layer",)),
        "overridden: the head is made INT8 there",
        HEAD,
    ),
    Row(
        "vllm.model_executor.model_loader.utils:process_weights_after_loading",
        Does(("quant_method.process_weights_after_loading(module)",)),
        "called once for every layer when its weights are there",
        HEAD,
    ),
    Row("vllm.config.vllm:VllmConfig.additional_config", Exists(), "options of the head", HEAD),
    Row("vllm.config.scheduler:SchedulerConfig.max_num_seqs", Exists(), "batches measured", HEAD),
    Row(
        "vllm.config.speculative:SpeculativeConfig.num_speculative_tokens",
        Exists(),
        "batches measured",
        HEAD,
    ),
    Row("vllm.model_executor.utils:set_weight_attrs", Exists(), "attributes of the weight", HEAD),
    Row(
        f"{EMBEDDING}:UnquantizedEmbeddingMethod.create_weights",
        Takes(
            (
                "layer",
                "input_size_per_partition",
                "output_partition_sizes",
                "input_size",
                "output_size",
                "params_dtype",
            )
        ),
        "the head's method is called like this one",
        HEAD,
    ),
    Row(
        f"{EMBEDDING}:UnquantizedEmbeddingMethod.apply",
        Takes(("layer", "x", "bias")),
        "the head's method is called like this one",
        HEAD,
    ),
    Row(
        "vllm._custom_ops:gptq_marlin_repack",
        Takes(("b_q_weight",), keywords=("size_k", "size_n", "num_bits")),
        "repacks the INT8 rows for Marlin",
        WAYS,
    ),
    Row(
        f"{MARLIN}:marlin_permute_scales",
        Takes(("s",), keywords=("size_k", "size_n", "group_size")),
        "orders the scales for Marlin",
        WAYS,
    ),
    Row(f"{MARLIN}:marlin_make_empty", Takes(("device",)), "no zero points", WAYS),
    Row(f"{MARLIN}:marlin_make_workspace_new", Takes(("device",)), "locks of the kernel", WAYS),
    Row(
        f"{MARLIN}:apply_gptq_marlin_linear",
        Takes(
            ("input", "weight", "weight_scale", "weight_zp"),
            keywords=(
                "workspace",
                "wtype",
                "output_size_per_partition",
                "input_size_per_partition",
            ),
        ),
        "computes the head",
        WAYS,
    ),
    Row("vllm.scalar_type:scalar_types.uint8b128", Exists(), "INT8 with a bias of 128", WAYS),
    Row("vllm.scalar_type:scalar_types", Exists(), "names of the packed types", WAYS),
    Row(f"{NVML}:nvmlInit", Takes(), "names the driver", HEAD),
    Row(f"{NVML}:nvmlShutdown", Takes(), "names the driver", HEAD),
    Row(f"{NVML}:nvmlSystemGetDriverVersion", Takes(), "names the driver", HEAD),
)
