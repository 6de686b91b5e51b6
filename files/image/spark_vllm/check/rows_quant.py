"""What we rely on in vLLM's registration, INC, base classes and block FP8."""

from __future__ import annotations

from spark_vllm.check.row import Row
from spark_vllm.check.rules import Absent, Contains, Does, Exists, Inherits, Takes

QUANT = "vllm.model_executor.layers.quantization"
LAYERS = "vllm.model_executor.layers"
LOADER = "vllm.model_executor.model_loader"

INC = f"{QUANT}.inc.inc:INCConfig"
BASE = f"{QUANT}.base_config:QuantizationConfig"
SCHEME = f"{QUANT}.inc.schemes.inc_wna16_scheme:INCWna16Scheme"
LINEAR = f"{QUANT}.inc.schemes.inc_wna16_linear:INCWNA16LinearScheme"

REGISTRATION_ROWS = (
    Row(
        f"{QUANT}:register_quantization_config",
        Takes(("quantization",)),
        "the config class is registered by it",
        "register.py",
    ),
    Row(
        f"{QUANT}:register_quantization_config",
        Does(("QUANTIZATION_METHODS.append(quantization)",)),
        "a registered name is accepted as quant_method",
        "register.py",
    ),
    Row(f"{QUANT}:get_quantization_config", Takes(("quantization",)), "finds it", "check/live.py"),
    Row("vllm.config.load:LoadConfig", Exists(), "asks for our loader", "check/live.py"),
    Row(f"{QUANT}:QUANTIZATION_METHODS", Exists(), "tells whether we registered", "register.py"),
    Row(f"{QUANT}:QuantizationMethods", Contains("inc"), "the method we extend", "spark_inc.py"),
    Row(
        f"{LOADER}:register_model_loader",
        Takes(("load_format",)),
        "the portable load format is registered by it",
        "register.py",
    ),
    Row(
        "vllm.plugins:DEFAULT_PLUGINS_GROUP",
        Contains("vllm.general_plugins"),
        "our entry point's group is loaded in every process",
        "pyproject.toml",
    ),
    Row(
        "vllm.plugins:load_plugins_by_group",
        Does(("plugin.name in allowed_plugins",)),
        "VLLM_PLUGINS=spark selects our entry point by name",
        "Dockerfile",
    ),
    Row("vllm.logger:init_logger", Takes(("name",)), "our log lines get handlers", "spark_inc.py"),
    Row(
        "vllm.config.model:ModelConfig._verify_quantization",
        Does(
            (
                "method.override_quantization_method("
                "quant_cfg, self.quantization, hf_config=self.hf_config)",
                "quant_method = quant_cfg['quant_method']",
            )
        ),
        "quant_method of config.json selects our class, and we must not claim others' names",
        "spark_inc.py",
    ),
    Row(
        "vllm.config.vllm:VllmConfig._get_quantization_config",
        Does(
            (
                "quant_config.maybe_update_config(model_config.model, "
                "hf_config=model_config.hf_config, revision=model_config.revision)",
            )
        ),
        "the checkpoint is checked there, before any weight is loaded",
        "spark_inc.py",
    ),
)

INC_ROWS = (
    Row(f"{QUANT}.inc:INCConfig", Exists(), "our class extends it", "spark_inc.py"),
    Row(INC, Inherits("QuantizationConfig"), "mappers and hooks come from there", "spark_inc.py"),
    Row(
        f"{INC}.__init__",
        Takes(
            keywords=(
                "weight_bits",
                "group_size",
                "sym",
                "packing_format",
                "block_name_to_quantize",
                "extra_config",
                "data_type",
                "backend",
            )
        ),
        "from_config calls it on our class with these keywords",
        "spark_inc.py",
    ),
    Row(
        f"{INC}.__init__",
        Does(
            (
                "self.extra_config = extra_config",
                "self.config_parser = INCConfigParser(self)",
                "block_name_to_quantize.split(',')",
            )
        ),
        "16-bit and 8-bit modules, and the blocks to quantise, are read from these",
        "spark_inc.py",
    ),
    Row(
        f"{INC}.from_config",
        Takes(("config",), decorator="classmethod"),
        "we call it and attach our own fields",
        "spark_inc.py",
    ),
    Row(
        f"{INC}.override_quantization_method",
        Takes(("hf_quant_cfg", "user_quant", "hf_config"), decorator="classmethod"),
        "overridden, so that plain auto-round checkpoints stay INC's",
        "spark_inc.py",
    ),
    Row(
        f"{INC}.get_name",
        Takes(decorator="classmethod"),
        "overridden with our name",
        "spark_inc.py",
    ),
    Row(
        f"{INC}.get_quant_method",
        Takes(("layer", "prefix")),
        "we dispatch FP8 first and hand on the rest",
        "spark_inc.py",
    ),
    Row(
        f"{INC}.get_quant_method",
        Does(
            (
                "isinstance(layer, (LinearBase, ParallelLMHead))",
                "scheme.get_linear_method(self, layer, prefix, layer_config)",
                "scheme.get_moe_method(self, layer, prefix, layer_config)",
            )
        ),
        "INT4 experts and linears and the INT8 head go this way",
        "spark_inc.py",
    ),
    Row(
        f"{INC}.apply_vllm_mapper",
        Takes(("hf_to_vllm_mapper",)),
        "our module names are mapped beside INC's own",
        "spark_inc.py",
    ),
    Row(
        f"{INC}.apply_vllm_mapper",
        Does(("hf_to_vllm_mapper.apply_dict(self.extra_config)",)),
        "the lm_head entry keeps its short name and matches by suffix",
        "checkpoint/gate.py",
    ),
    Row(
        f"{INC}.maybe_update_config",
        Absent(),
        "we override the base class's empty one",
        "spark_inc.py",
    ),
    Row(
        f"{INC}.get_checkpoint_weight_mapper",
        Absent(),
        "we extend the base class's mapper",
        "spark_inc.py",
    ),
    Row(
        f"{QUANT}.inc.config_parser:INCConfigParser._resolve_raw",
        Does(
            (
                "layer_name.endswith(f'.{cfg_key}')",
                "quantized = not isinstance(layer, ParallelLMHead)",
                "layer_name.startswith(name)",
            )
        ),
        "which modules INC takes as quantised is computed the same way in our gate",
        "checkpoint/gate.py",
    ),
    Row(
        f"{QUANT}.inc.schemes.factory:resolve_scheme",
        Takes(("layer_config",)),
        "INT4 and INT8 resolve to the WNA16 scheme",
        "spark_inc.py",
    ),
    Row(
        f"{QUANT}.inc.schemes.factory:resolve_scheme",
        Does(("INCWna16Scheme", "scheme_cls.can_handle(layer_config)")),
        "INT4 and INT8 resolve to the WNA16 scheme",
        "spark_inc.py",
    ),
    Row(
        f"{SCHEME}.can_handle",
        Does(("layer_config.is_wna16_int",)),
        "INT4 and INT8 are its formats",
        "spark_inc.py",
    ),
    Row(
        f"{SCHEME}.get_linear_method",
        Takes(("config", "layer", "prefix", "layer_config")),
        "packed linears and the INT8 head",
        "spark_inc.py",
    ),
    Row(
        f"{SCHEME}.get_linear_method",
        Does(("INCLinearMethod(INCWNA16LinearScheme(layer_config))",)),
        "packed linears and the INT8 head",
        "spark_inc.py",
    ),
    Row(
        f"{SCHEME}.get_moe_method",
        Takes(("config", "layer", "prefix", "layer_config")),
        "packed experts",
        "spark_inc.py",
    ),
    Row(
        f"{SCHEME}.get_moe_method",
        Does(("_resolve_gptq_moe(layer, layer_config)",)),
        "packed experts take the GPTQ path",
        "spark_inc.py",
        versions=("0.30.0", "0.32.0"),
    ),
    Row(
        f"{SCHEME}.get_moe_method",
        Does(("INCWNA16MoEScheme(layer_config).get_method(layer)",)),
        "packed experts take the GPTQ path",
        "spark_inc.py",
        versions=("0.33.0",),
    ),
    Row(
        f"{QUANT}.inc.schemes.inc_wna16_moe:INCWNA16MoEScheme",
        Does(("AutoGPTQMoEMethod",)),
        "packed experts end in the GPTQ method",
        "spark_inc.py",
        versions=("0.33.0",),
    ),
    Row(
        f"{LINEAR}._build_gptq_method",
        Does(
            (
                "{(4, True): scalar_types.uint4b8, (8, True): scalar_types.uint8b128}",
                "AutoGPTQLinearMethod",
            )
        ),
        "stored values have the bias 2 ** (bits - 1), zero points are not read",
        "checkpoint/dequantise.py",
    ),
    Row(
        f"{QUANT}.inc.inc_linear:INCLinearMethod.create_weights",
        Does(("self.scheme.create_weights",)),
        "qweight, scales and qzeros are the parameters' names",
        "checkpoint/gate.py",
    ),
)

BASE_ROWS = (
    Row(
        f"{BASE}.maybe_update_config",
        Takes(("model_name", "hf_config", "revision")),
        "overridden: the gate before loading",
        "spark_inc.py",
    ),
    Row(
        f"{BASE}.get_checkpoint_weight_mapper",
        Takes(),
        "overridden: the overlay's renames",
        "spark_inc.py",
    ),
    Row(f"{BASE}.online_quantization_config", Exists(), "pickled with our class", "spark_inc.py"),
    Row(
        f"{QUANT}.base_config:resolve_quant_method",
        Takes(("quant_config", "layer", "prefix")),
        "every layer asks us through it",
        "spark_inc.py",
    ),
    Row(
        f"{QUANT}.base_config:resolve_quant_method",
        Does(("quant_config.get_quant_method(layer, prefix)",)),
        "every layer asks us through it",
        "spark_inc.py",
    ),
    Row(
        f"{QUANT}.base_config:QuantizeMethodBase",
        Exists(),
        "what get_quant_method returns",
        "spark_inc.py",
    ),
)

FP8_ROWS = (
    Row(f"{QUANT}.fp8:Fp8Config", Exists(), "describes the block-FP8 layers", "spark_inc.py"),
    Row(f"{QUANT}.fp8:Fp8LinearMethod", Exists(), "computes them", "spark_inc.py"),
    Row(
        f"{QUANT}.fp8:Fp8Config.__init__",
        Takes(keywords=("is_checkpoint_fp8_serialized", "activation_scheme", "weight_block_size")),
        "built for every block-FP8 layer",
        "spark_inc.py",
    ),
    Row(
        f"{QUANT}.fp8:Fp8LinearMethod.__init__",
        Takes(("quant_config",)),
        "returned for every block-FP8 layer",
        "spark_inc.py",
    ),
    Row(
        f"{QUANT}.fp8:Fp8LinearMethod.create_weights",
        Does(
            (
                "layer.register_parameter('weight', weight)",
                "layer.register_parameter('weight_scale_inv', scale)",
            )
        ),
        "the checkpoint's names are these after our renames",
        "checkpoint/names.py",
    ),
    Row(
        f"{LAYERS}.linear:WEIGHT_LOADER_V2_SUPPORTED",
        Contains("Fp8LinearMethod"),
        "block scales of fused modules need the second weight loader",
        "spark_inc.py",
    ),
)

ROWS = (*REGISTRATION_ROWS, *INC_ROWS, *BASE_ROWS, *FP8_ROWS)
