"""Llama, Nemotron and models in their shapes.

Mistral, Yi, InternLM, Baichuan, OLMo, Phi, Granite, SmolLM, Grok, DBRX and others; the models of Megatron's own tests.
"""

from __future__ import annotations

from paceline.job.known import LLAMA, KnownModel, family

_CONFIG = "config.json of the model's Hugging Face repository"
_COLUMNS = "layers hidden ffn heads kv_heads vocab seq"

_META: tuple[KnownModel, ...] = (
    *family(
        "Llama",
        "arXiv:2302.13971, table 2; arXiv:2307.09288; arXiv:2407.21783, table 3; config.json",
        _COLUMNS,
        {
            "llama-7b": (32, 4096, 11008, 32, 32, 32000, 2048, 6.738, "llama-1-7b llama-6.7b"),
            "llama-13b": (40, 5120, 13824, 40, 40, 32000, 2048, 13.016, "llama-1-13b"),
            "llama-30b": (60, 6656, 17920, 52, 52, 32000, 2048, 32.529, "llama-33b llama-1-33b"),
            "llama-65b": (80, 8192, 22016, 64, 64, 32000, 2048, 65.286, "llama-1-65b"),
            "llama-2-7b": (32, 4096, 11008, 32, 32, 32000, 4096, 6.738),
            "llama-2-13b": (40, 5120, 13824, 40, 40, 32000, 4096, 13.016),
            "llama-2-70b": (80, 8192, 28672, 64, 8, 32000, 4096, 68.977),
            "codellama-7b": (32, 4096, 11008, 32, 32, 32016, 16384, 6.739),
            "codellama-13b": (40, 5120, 13824, 40, 40, 32016, 16384, 13.016),
            "codellama-34b": (48, 8192, 22016, 64, 8, 32000, 16384, 33.744, "code-llama-34b"),
            "codellama-70b": (80, 8192, 28672, 64, 8, 32016, 16384, 68.977),
            "llama-3-8b": (32, 4096, 14336, 32, 8, 128256, 8192, 8.030),
            "llama-3-70b": (80, 8192, 28672, 64, 8, 128256, 8192, 70.554),
            "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128256, 8192, 8.030),
            "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128256, 8192, 70.554),
            "llama-3.1-405b": (126, 16384, 53248, 128, 8, 128256, 8192, 405.853, "llama-3-405b"),
            "llama-3.3-70b": (80, 8192, 28672, 64, 8, 128256, 8192, 70.554),
            "tinyllama-1.1b": (22, 2048, 5632, 32, 4, 32000, 2048, 1.100, "tinyllama"),
        },
        {**LLAMA},
    ),
    *family(
        "Llama",
        _CONFIG,
        _COLUMNS,
        {
            "llama-3.2-1b": (16, 2048, 8192, 32, 8, 128256, 8192, 1.236),
            "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128256, 8192, 3.213),
        },
        {**LLAMA | {"tied": True}},
    ),
    *family(
        "Llama",
        "MaxText: configs/models/llama4-17b-16e.yml, llama4-17b-128e.yml",
        "experts moe_every ffn",
        {
            "llama-4-scout": (16, 1, 16384, 107.8, "llama-4-scout-17b-16e llama-4-17b-16e"),
            "llama-4-maverick": (128, 2, 16384, 400.7, "llama-4-maverick-17b-128e llama-4-17b-128e"),
        },
        {
            "layers": 48,
            "hidden": 5120,
            "heads": 40,
            "kv_heads": 8,
            "vocab": 202048,
            "seq": 8192,
            "top_k": 1,
            "expert_ffn": 8192,
            "shared_experts": 1,
            "window": 8192,
            "full_every": 4,
            **LLAMA,
        },
    ),
)

_MISTRAL: tuple[KnownModel, ...] = (
    *family(
        "Mistral",
        _CONFIG,
        f"{_COLUMNS} head_dim window",
        {
            "mistral-7b": (32, 4096, 14336, 32, 8, 32000, 8192, 128, 4096, 7.242),
            "mistral-nemo-12b": (40, 5120, 14336, 32, 8, 131072, 8192, 128, None, 12.248),
            "mistral-small-22b": (56, 6144, 16384, 48, 8, 32768, 8192, 128, None, 22.247, "mistral-small-2409"),
            "mistral-small-24b": (40, 5120, 32768, 32, 8, 131072, 8192, 128, None, 23.572),
            "mistral-large-123b": (88, 12288, 28672, 96, 8, 32768, 8192, 128, None, 122.610),
            "codestral-22b": (56, 6144, 16384, 48, 8, 32768, 8192, 128, None, 22.247, "codestral"),
        },
        {**LLAMA},
        also={
            "mistral-nemo-12b": "mistral-nemo mistral-nemo-2407",
            "mistral-small-24b": "mistral-small-3 mistral-small-24b-2501",
            "mistral-large-123b": "mistral-large-2 mistral-large-2407 mistral-large",
        },
    ),
    *family(
        "Mistral",
        "arXiv:2401.04088, table 1; config.json",
        _COLUMNS,
        {
            "mixtral-8x7b": (32, 4096, 14336, 32, 8, 32000, 4096, 46.703),
            "mixtral-8x22b": (56, 6144, 16384, 48, 8, 32768, 4096, 140.630),
        },
        {"experts": 8, "top_k": 2, **LLAMA},
    ),
)

_DENSE: tuple[KnownModel, ...] = (
    *family(
        "Yi",
        "arXiv:2403.04652, table 1",
        _COLUMNS,
        {
            "yi-6b": (32, 4096, 11008, 32, 4, 64000, 4096, 6.061),
            "yi-34b": (60, 7168, 20480, 56, 8, 64000, 4096, 34.389),
        },
        {**LLAMA},
    ),
    *family(
        "InternLM",
        _CONFIG,
        _COLUMNS,
        {
            "internlm2-7b": (32, 4096, 14336, 32, 8, 92544, 4096, 7.738),
            "internlm2-20b": (48, 6144, 16384, 48, 8, 92544, 4096, 19.861),
        },
        {**LLAMA},
    ),
    *family(
        "Baichuan",
        "arXiv:2309.10305, table 2; config.json",
        _COLUMNS,
        {
            "baichuan-7b": (32, 4096, 11008, 32, 32, 64000, 4096, 7.000),
            "baichuan-13b": (40, 5120, 13696, 40, 40, 64000, 4096, 13.265),
            "baichuan2-7b": (32, 4096, 11008, 32, 32, 125696, 4096, 7.506),
            "baichuan2-13b": (40, 5120, 13696, 40, 40, 125696, 4096, 13.897),
        },
        {**LLAMA},
    ),
    *family(
        "OLMo",
        "arXiv:2402.00838, table 1; arXiv:2501.00656; config.json",
        _COLUMNS,
        {
            "olmo-7b": (32, 4096, 11008, 32, 32, 50304, 2048, 6.888),
            "olmo-2-1b": (16, 2048, 8192, 16, 16, 100352, 4096, 1.485),
            "olmo-2-7b": (32, 4096, 11008, 32, 32, 100352, 4096, 7.299),
            "olmo-2-13b": (40, 5120, 13824, 40, 40, 100352, 4096, 13.716),
            "olmo-2-32b": (64, 5120, 27648, 40, 8, 100352, 4096, 32.234),
        },
        {**LLAMA},
    ),
    *family(
        "OLMo", _CONFIG, _COLUMNS, {"olmo-1b": (16, 2048, 8192, 16, 16, 50304, 2048, 1.177)}, {**LLAMA | {"tied": True}}
    ),
    *family(
        "Phi",
        _CONFIG,
        _COLUMNS,
        {
            "phi-3-mini": (32, 3072, 8192, 32, 32, 32064, 4096, 3.821, "phi-3-3.8b phi-3.5-mini"),
            "phi-3-medium": (40, 5120, 17920, 40, 10, 32064, 4096, 13.960, "phi-3-14b"),
            "phi-4": (40, 5120, 17920, 40, 10, 100352, 4096, 14.660, "phi-4-14b"),
        },
        {**LLAMA},
    ),
    *family(
        "Phi",
        _CONFIG,
        _COLUMNS,
        {"phi-4-mini": (32, 3072, 8192, 24, 8, 200064, 4096, 3.836)},
        {**LLAMA | {"tied": True}},
    ),
    *family(
        "Granite",
        _CONFIG,
        _COLUMNS,
        {
            "granite-3-2b": (40, 2048, 8192, 32, 8, 49155, 4096, 2.534, "granite-3.0-2b"),
            "granite-3-8b": (40, 4096, 12800, 32, 8, 49155, 4096, 8.171, "granite-3.0-8b"),
        },
        {**LLAMA | {"tied": True}},
    ),
    *family(
        "SmolLM",
        _CONFIG,
        _COLUMNS,
        {
            "smollm-135m": (30, 576, 1536, 9, 3, 49152, 2048, 0.1345, "smollm2-135m"),
            "smollm-360m": (32, 960, 2560, 15, 5, 49152, 2048, 0.3618, "smollm2-360m"),
            "smollm-1.7b": (24, 2048, 8192, 32, 32, 49152, 2048, 1.711, "smollm2-1.7b"),
            "smollm3-3b": (36, 2048, 11008, 16, 4, 128256, 4096, 3.075),
        },
        {**LLAMA | {"tied": True}},
    ),
    *family(
        "Command R",
        _CONFIG,
        _COLUMNS,
        {
            "command-r-35b": (40, 8192, 22528, 64, 64, 256000, 8192, 34.981, "command-r"),
            "command-r-plus-104b": (64, 12288, 33792, 96, 8, 256000, 8192, 103.811, "command-r-plus"),
        },
        {"parallel": True, **LLAMA | {"tied": True}},
    ),
)

_EXPERTS: tuple[KnownModel, ...] = (
    *family(
        "Grok",
        "xai-org/grok-1: run.py",
        f"{_COLUMNS} experts top_k",
        {"grok-1": (64, 6144, 32768, 48, 8, 131072, 8192, 8, 2, 314, "grok-1-314b")},
        {"head_dim": 128, **LLAMA | {"tied": True}},
    ),
    *family(
        "DBRX",
        _CONFIG,
        f"{_COLUMNS} experts top_k",
        {"dbrx": (40, 6144, 10752, 48, 8, 100352, 32768, 16, 4, 131.6, "dbrx-132b")},
        {**LLAMA},
    ),
    *family(
        "Arctic",
        "config.json; its dense part stands beside every mixture, as a shared expert",
        f"{_COLUMNS} experts top_k shared_ffn",
        {"arctic-480b": (35, 7168, 4864, 56, 8, 32000, 4096, 128, 2, 7168, 480, "arctic snowflake-arctic")},
        {**LLAMA},
    ),
    *family(
        "OLMo",
        "arXiv:2409.02060, table 10",
        f"{_COLUMNS} experts top_k",
        {"olmoe-1b-7b": (16, 2048, 1024, 16, 16, 50304, 4096, 64, 8, 6.919, "olmoe")},
        {**LLAMA},
    ),
    *family(
        "Phi",
        _CONFIG,
        f"{_COLUMNS} experts top_k",
        {"phi-3.5-moe": (32, 4096, 6400, 32, 8, 32064, 4096, 16, 2, 41.873)},
        {**LLAMA},
    ),
)

_NEMOTRON: tuple[KnownModel, ...] = family(
    "Nemotron",
    "arXiv:2402.16819, table 1; arXiv:2406.11704, table 1; arXiv:2407.14679; NeMo: llm/gpt/model/nemotron.py",
    "layers hidden ffn heads kv_heads",
    {
        "minitron-4b": (32, 3072, 9216, 24, 8, 4.19, "nemotron-4b nemotron-mini-4b"),
        "nemotron-3-8b": (32, 4096, 16384, 32, 32, 8.54, "nemotron-8b"),
        "nemotron-3-22b": (40, 6144, 24576, 48, 48, 21.3, "nemotron-22b"),
        "nemotron-4-15b": (32, 6144, 24576, 48, 8, 15.6, "nemotron-15b gpt3-15b-8t"),
        "nemotron-4-340b": (96, 18432, 73728, 96, 8, 341, "nemotron-340b"),
    },
    {"vocab": 256000, "seq": 4096, "tied": False, "positions": False, "biases": "none"},
)

_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_ULTRA = "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
_56B = (
    "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-"
    "M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
)
_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_12B = "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"
# of a small model in Megatron's tests
_SMALL = "MEMEM*EMEMEM*E"


def _mamba(state: int, heads: int, head_dim: int = 64) -> dict[str, int]:
    return {"state": state, "heads": heads, "head_dim": head_dim, "groups": 8, "conv": 4}


_HYBRID: tuple[KnownModel, ...] = (
    *family(
        "Nemotron",
        "NVIDIA-NeMo/Megatron-Bridge: models/nemotronh/nemotron_h_provider.py; arXiv:2504.03624; arXiv:2508.14444",
        "layers pattern hidden mamba ffn heads head_dim",
        {
            "nemotron-h-8b": (len(_8B), _8B, 4096, _mamba(128, 128), 21504, 32, 128, 8.1, "nemotronh-8b"),
            "nemotron-h-47b": (len(_47B), _47B, 8192, _mamba(256, 256), 30720, 64, 128, 46.8, "nemotronh-47b"),
            "nemotron-h-56b": (len(_56B), _56B, 8192, _mamba(256, 256), 32768, 64, 128, 56.3, "nemotronh-56b"),
            "nemotron-nano-9b-v2": (len(_9B), _9B, 4480, _mamba(128, 128, 80), 15680, 40, 128, 8.89),
            "nemotron-nano-12b-v2": (len(_12B), _12B, 5120, _mamba(128, 128, 80), 20480, 40, 128, 12.31),
        },
        {
            "kv_heads": 8,
            "vocab": 131072,
            "seq": 8192,
            "tied": False,
            "positions": False,
            "biases": "none",
            "dropout": False,
        },
    ),
    *family(
        "Nemotron",
        "NVIDIA-NeMo/Megatron-Bridge: models/nemotronh/nemotron_h_provider.py; NVIDIA/Megatron-LM: functional_tests",
        "pattern hidden heads head_dim mamba experts top_k expert_ffn shared_ffn expert_hidden mtp seq vocab",
        {
            "nemotron-3-nano": (
                _NANO,
                2688,
                32,
                128,
                _mamba(128, 64),
                128,
                6,
                1856,
                3712,
                None,
                0,
                8192,
                131072,
                31.58,
            ),
            "nemotron-3.5-lightning": (
                _NANO,
                2688,
                32,
                128,
                _mamba(128, 64),
                128,
                6,
                1856,
                3712,
                None,
                2,
                8192,
                131072,
                31.58,
            ),
            "nemotron-3-super": (
                _SUPER,
                4096,
                32,
                128,
                _mamba(128, 128),
                512,
                22,
                2688,
                5376,
                1024,
                2,
                8192,
                131072,
                120.6,
            ),
            "nemotron-3-ultra": (
                _ULTRA,
                8192,
                64,
                128,
                _mamba(128, 256),
                512,
                22,
                5120,
                10240,
                2048,
                2,
                8192,
                131072,
                550,
            ),
            "nemotron-3.5-lightning-no-load-optim": (
                _SMALL,
                768,
                8,
                64,
                _mamba(128, 16),
                32,
                4,
                512,
                1024,
                None,
                2,
                2048,
                50304,
                None,
            ),
        },
        {"kv_heads": 2, "tied": False, "positions": False, "biases": "none", "dropout": False},
        also={
            "nemotron-3-nano": "nemotron-3-nano-30b-a3b nemotron-3-nano-30b",
            "nemotron-3-ultra": "nemotron-3-ultra-550b-a55b nemotron-3-ultra-550b",
            "nemotron-3.5-lightning": "nemotron35-lightning",
            "nemotron-3.5-lightning-no-load-optim": "nemotron35-lightning-no-load-optim",
            "nemotron-3-super": "nemotron-3-super-120b-a12b nemotron-3-super-120b",
        },
    ),
)
# one letter a layer
_HYBRID = tuple(
    model._replace(dimensions={**model.dimensions, "layers": len(model.dimensions["pattern"])}) for model in _HYBRID
)

_TESTS: tuple[KnownModel, ...] = (
    *family(
        "Megatron's tests",
        "NVIDIA/Megatron-LM: model_config.yaml of functional test gpt3_7b_*",
        "layers hidden heads kv_heads vocab",
        {"gpt3-7b-memory-speed": (32, 4096, 32, 8, 131200, None)},
        {"seq": 8192, "tied": False},
        also={"gpt3-7b-memory-speed": "gpt3-7b-tp1-pp4-memory-speed gpt3-7b-tp4-pp1-memory-speed"},
    ),
    *family(
        "Megatron's tests",
        "NVIDIA/Megatron-LM: model_config.yaml of functional test deepseekv3_proxy_*",
        "layers hidden ffn heads experts top_k expert_ffn shared_experts dense_layers vocab mtp",
        {"deepseek-v3-proxy": (14, 7168, 18432, 128, 64, 8, 2048, 1, 3, 256000, 1, None)},
        {"mla": {"q_rank": 1536, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128}, "seq": 4096, **LLAMA},
    ),
    *family(
        "Megatron's tests",
        "NVIDIA/Megatron-LM: model_config.yaml of functional test t5_11b_mcore_tp4_pp1",
        "layers encoder_layers hidden ffn heads",
        {"t5-11b-mcore": (24, 24, 4096, 10240, 64, None)},
        {"head_dim": 64, "vocab": 29184, "seq": 128, "source_seq": 512, "positions": 512},
    ),
)

MODELS: tuple[KnownModel, ...] = (*_META, *_MISTRAL, *_DENSE, *_EXPERTS, *_NEMOTRON, *_HYBRID, *_TESTS)
