"""Qwen, Gemma, DeepSeek, Kimi, GLM and GPT-OSS."""

from __future__ import annotations

from paceline.job.known import LLAMA, KnownModel, family

_CONFIG = "config.json of the model's Hugging Face repository"
_COLUMNS = "layers hidden ffn heads kv_heads vocab tied"

_QWEN: tuple[KnownModel, ...] = (
    *family(
        "Qwen",
        _CONFIG,
        _COLUMNS,
        {
            "qwen1.5-0.5b": (24, 1024, 2816, 16, 16, 151936, True, 0.464),
            "qwen1.5-1.8b": (24, 2048, 5504, 16, 16, 151936, False, 1.837),
            "qwen1.5-4b": (40, 2560, 6912, 20, 20, 151936, False, 3.950),
            "qwen1.5-7b": (32, 4096, 11008, 32, 32, 151936, False, 7.721, "qwen-7b"),
            "qwen1.5-14b": (40, 5120, 13696, 40, 40, 152064, False, 14.167, "qwen-14b"),
            "qwen1.5-32b": (64, 5120, 27392, 40, 8, 152064, False, 32.512),
            "qwen1.5-72b": (80, 8192, 24576, 64, 64, 152064, False, 72.288, "qwen-72b"),
            "qwen1.5-110b": (80, 8192, 49152, 64, 8, 152064, False, 111.210),
            "qwen2-0.5b": (24, 896, 4864, 14, 2, 151936, True, 0.494),
            "qwen2-1.5b": (28, 1536, 8960, 12, 2, 151936, True, 1.544),
            "qwen2-7b": (28, 3584, 18944, 28, 4, 152064, False, 7.616),
            "qwen2-72b": (80, 8192, 29568, 64, 8, 152064, False, 72.706),
            "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 151936, True, 0.494),
            "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 151936, True, 1.544),
            "qwen2.5-3b": (36, 2048, 11008, 16, 2, 151936, True, 3.086),
            "qwen2.5-7b": (28, 3584, 18944, 28, 4, 152064, False, 7.616),
            "qwen2.5-14b": (48, 5120, 13824, 40, 8, 152064, False, 14.770),
            "qwen2.5-32b": (64, 5120, 27648, 40, 8, 152064, False, 32.764),
            "qwen2.5-72b": (80, 8192, 29568, 64, 8, 152064, False, 72.706),
        },
        {"biases": "qkv", "gated": True, "positions": False, "seq": 4096},
    ),
    *family(
        "Qwen",
        _CONFIG,
        "layers hidden heads kv_heads experts top_k expert_ffn shared_ffn",
        {
            "qwen1.5-moe-a2.7b": (24, 2048, 16, 16, 60, 4, 1408, 5632, 14.316),
            "qwen2-57b-a14b": (28, 3584, 28, 4, 64, 8, 2560, 20480, 57.409),
        },
        {"vocab": 151936, "biases": "qkv", "seq": 4096, **LLAMA},
    ),
    *family(
        "Qwen",
        "arXiv:2505.09388, table 1; MaxText: configs/models/qwen3-*.yml",
        _COLUMNS,
        {
            "qwen3-0.6b": (28, 1024, 3072, 16, 8, 151936, True, 0.596),
            "qwen3-1.7b": (28, 2048, 6144, 16, 8, 151936, True, 1.721),
            "qwen3-4b": (36, 2560, 9728, 32, 8, 151936, True, 4.022),
            "qwen3-8b": (36, 4096, 12288, 32, 8, 151936, False, 8.191),
            "qwen3-14b": (40, 5120, 17408, 40, 8, 151936, False, 14.768),
            "qwen3-32b": (64, 5120, 25600, 64, 8, 151936, False, 32.762),
        },
        {"head_dim": 128, "gated": True, "positions": False, "seq": 4096},
    ),
    *family(
        "Qwen",
        "arXiv:2505.09388, table 2; MaxText: configs/models/qwen3-*.yml",
        "layers hidden heads kv_heads experts top_k expert_ffn",
        {
            "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 8, 768, 30.532),
            "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 8, 1536, 235.094),
            "qwen3-coder-480b-a35b": (62, 6144, 96, 8, 160, 8, 2560, 480.155, "qwen3-480b-a35b"),
        },
        {"vocab": 151936, "head_dim": 128, "seq": 4096, **LLAMA},
    ),
)

_QWEN_NEXT: tuple[KnownModel, ...] = family(
    "Qwen",
    "config.json; MaxText: qwen3-next-80b-a3b.yml",
    "layers pattern",
    {"qwen3-next-80b-a3b": (96, 12 * "DEDEDE*E", 79.67, "qwen3-next-80b qwen3-next")},
    {
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 2,
        "head_dim": 256,
        "gated_attention": True,
        "delta": {"key_heads": 16, "value_heads": 32, "head_dim": 128},
        "experts": 512,
        "top_k": 10,
        "expert_ffn": 512,
        "shared_experts": 1,
        "vocab": 151936,
        "seq": 4096,
        **LLAMA,
    },
)

_GEMMA: tuple[KnownModel, ...] = family(
    "Gemma",
    "arXiv:2403.08295; arXiv:2408.00118; arXiv:2503.19786; MaxText: configs/models/gemma*.yml",
    "layers hidden ffn heads kv_heads head_dim vocab window full_every",
    {
        "gemma-2b": (18, 2048, 16384, 8, 1, 256, 256000, None, None, 2.506),
        "gemma-7b": (28, 3072, 24576, 16, 16, 256, 256000, None, None, 8.538),
        "gemma-2-2b": (26, 2304, 9216, 8, 4, 256, 256000, 4096, 2, 2.614),
        "gemma-2-9b": (42, 3584, 14336, 16, 8, 256, 256000, 4096, 2, 9.242),
        "gemma-2-27b": (46, 4608, 36864, 32, 16, 128, 256000, 4096, 2, 27.227),
        "gemma-3-1b": (26, 1152, 6912, 4, 1, 256, 262144, 512, 6, 1.000),
        "gemma-3-4b": (34, 2560, 10240, 8, 4, 256, 262144, 1024, 6, 3.880),
        "gemma-3-12b": (48, 3840, 15360, 16, 8, 256, 262144, 1024, 6, 11.766),
        "gemma-3-27b": (62, 5376, 21504, 32, 16, 128, 262144, 1024, 6, 27.009),
    },
    {"seq": 8192, "gated": True, "tied": True, "positions": False},
)

_GEMMA_4: tuple[KnownModel, ...] = (
    *family(
        "Gemma",
        "MaxText: gemma4-*.yml; heads of full attention count as the others, tables of each layer are left out",
        "layers hidden ffn heads kv_heads window",
        {
            "gemma-4-e4b": (42, 2560, 10240, 8, 2, 512, None, "gemma-4-4b"),
            "gemma-4-12b": (48, 3840, 15360, 16, 8, 1024, None),
            "gemma-4-31b": (60, 5376, 21504, 32, 16, 1024, None),
        },
        {"head_dim": 256, "vocab": 262144, "full_every": 6, "seq": 8192, "gated": True, "positions": False},
    ),
    *family(
        "Gemma",
        "MaxText: configs/models/gemma4-26b.yml; its dense part stands beside every mixture, as a shared expert",
        "layers hidden heads kv_heads experts top_k expert_ffn shared_ffn",
        {"gemma-4-26b-a4b": (30, 2816, 16, 8, 128, 8, 704, 2112, 25.2, "gemma-4-26b")},
        {
            "head_dim": 256,
            "vocab": 262144,
            "window": 1024,
            "full_every": 6,
            "seq": 8192,
            "gated": True,
            "positions": False,
        },
    ),
)

_LATENT = {"kv_rank": 512, "nope": 128, "rope": 64, "value": 128}
_MLA = _LATENT | {"q_rank": 1536}

_DEEPSEEK: tuple[KnownModel, ...] = (
    *family(
        "DeepSeek",
        "arXiv:2401.02954, table 2; config.json",
        "layers hidden ffn heads kv_heads vocab",
        {
            "deepseek-llm-7b": (30, 4096, 11008, 32, 32, 102400, 6.910, "deepseek-7b"),
            "deepseek-llm-67b": (95, 8192, 22016, 64, 8, 102400, 67.425, "deepseek-67b"),
        },
        {"seq": 4096, **LLAMA},
    ),
    *family(
        "DeepSeek",
        "arXiv:2401.06066; config.json",
        "layers hidden ffn heads experts top_k expert_ffn shared_experts dense_layers vocab",
        {"deepseek-moe-16b": (28, 2048, 10944, 16, 64, 6, 1408, 2, 1, 102400, 16.376)},
        {"seq": 4096, **LLAMA},
    ),
    *family(
        "DeepSeek",
        "arXiv:2405.04434, §3.1.2; arXiv:2412.19437, §4.2; arXiv:2502.16982; arXiv:2507.20534, table 2; config.json",
        "layers hidden ffn heads mla experts top_k expert_ffn shared_experts dense_layers vocab mtp",
        {
            "deepseek-v2": (60, 5120, 12288, 128, _MLA, 160, 6, 1536, 2, 1, 102400, 0, 235.741),
            "deepseek-v2-lite": (27, 2048, 10944, 16, _LATENT, 64, 6, 1408, 2, 1, 102400, 0, 15.706),
            "deepseek-v3": (61, 7168, 18432, 128, _MLA, 256, 8, 2048, 1, 3, 129280, 1, 671.026),
            "moonlight-16b-a3b": (27, 2048, 11264, 16, _LATENT, 64, 6, 1408, 2, 1, 163840, 0, 15.960),
            "kimi-k2": (61, 7168, 18432, 64, _MLA, 384, 8, 2048, 1, 1, 163840, 0, 1026.408),
        },
        {"seq": 4096, **LLAMA},
        also={
            "deepseek-v2": "deepseek-v2-236b deepseek2-236b deepseek-v2.5",
            "deepseek-v2-lite": "deepseek-v2-lite-16b deepseek2-16b",
            "deepseek-v3": "deepseek-v3-671b deepseek3-671b deepseek-r1 deepseek-v3.1 deepseek-3-671b",
            "moonlight-16b-a3b": "moonlight-16b moonlight",
            "kimi-k2": "kimi-k2-1t kimi-k2-1t-a32b kimi-k2.5 kimi-k2.6",
        },
    ),
)

_OTHERS: tuple[KnownModel, ...] = (
    *family(
        "GLM",
        _CONFIG,
        "layers hidden ffn heads kv_heads vocab",
        {
            "chatglm2-6b": (28, 4096, 13696, 32, 2, 65024, 6.244, "chatglm3-6b"),
            "glm-4-9b": (40, 4096, 13696, 32, 2, 151552, 9.400),
        },
        {"biases": "qkv", "seq": 8192, **LLAMA},
    ),
    *family(
        "GLM",
        "arXiv:2508.06471, table 1; config.json",
        "layers hidden ffn heads experts top_k expert_ffn shared_experts dense_layers",
        {
            "glm-4.5": (92, 5120, 12288, 96, 160, 8, 1536, 1, 3, 352.8, "glm-4.5-355b-a32b glm-4.6"),
            "glm-4.5-air": (46, 4096, 10944, 96, 128, 8, 1408, 1, 1, 106.85, "glm-4.5-air-106b-a12b"),
        },
        {"kv_heads": 8, "head_dim": 128, "vocab": 151552, "mtp": 1, "biases": "qkv", "seq": 4096, **LLAMA},
    ),
    *family(
        "GPT-OSS",
        "arXiv:2508.10925, table 1; MaxText: configs/models/gpt-oss-*.yml",
        "layers experts",
        {"gpt-oss-20b": (24, 32, 20.91), "gpt-oss-120b": (36, 128, 116.83)},
        {
            "hidden": 2880,
            "ffn": 2880,
            "heads": 64,
            "kv_heads": 8,
            "head_dim": 64,
            "vocab": 201088,
            "top_k": 4,
            "window": 128,
            "full_every": 2,
            "biases": "all",
            "seq": 4096,
            **LLAMA,
        },
    ),
)

MODELS: tuple[KnownModel, ...] = (*_QWEN, *_QWEN_NEXT, *_GEMMA, *_GEMMA_4, *_DEEPSEEK, *_OTHERS)
