"""Llama and models in its shape.

Mistral, Yi, InternLM, Baichuan, OLMo, Phi, Granite, SmolLM, Grok, DBRX and others.
"""

from __future__ import annotations

from paceline.job.known.entry import LLAMA, KnownModel, family

_CONFIG = "config.json of the model's Hugging Face repository"
_COLUMNS = "layers hidden ffn heads kv_heads vocab seq"

_META: tuple[KnownModel, ...] = (
    *family(
        "Llama",
        "arXiv:2302.13971, table 2; arXiv:2307.09288; arXiv:2407.21783, table 3; config.json",
        _COLUMNS,
        {
            "llama-7b": (32, 4096, 11008, 32, 32, 32000, 2048, 6.738),
            "llama-13b": (40, 5120, 13824, 40, 40, 32000, 2048, 13.016),
            "llama-30b": (60, 6656, 17920, 52, 52, 32000, 2048, 32.529),
            "llama-65b": (80, 8192, 22016, 64, 64, 32000, 2048, 65.286),
            "llama-2-7b": (32, 4096, 11008, 32, 32, 32000, 4096, 6.738),
            "llama-2-13b": (40, 5120, 13824, 40, 40, 32000, 4096, 13.016),
            "llama-2-70b": (80, 8192, 28672, 64, 8, 32000, 4096, 68.977),
            "codellama-7b": (32, 4096, 11008, 32, 32, 32016, 16384, 6.739),
            "codellama-13b": (40, 5120, 13824, 40, 40, 32016, 16384, 13.016),
            "codellama-34b": (48, 8192, 22016, 64, 8, 32000, 16384, 33.744),
            "codellama-70b": (80, 8192, 28672, 64, 8, 32016, 16384, 68.977),
            "llama-3-8b": (32, 4096, 14336, 32, 8, 128256, 8192, 8.030),
            "llama-3-70b": (80, 8192, 28672, 64, 8, 128256, 8192, 70.554),
            "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128256, 8192, 8.030),
            "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128256, 8192, 70.554),
            "llama-3.1-405b": (126, 16384, 53248, 128, 8, 128256, 8192, 405.853),
            "llama-3.3-70b": (80, 8192, 28672, 64, 8, 128256, 8192, 70.554),
            "tinyllama-1.1b": (22, 2048, 5632, 32, 4, 32000, 2048, 1.100),
        },
        also={
            "llama-7b": ("llama-1-7b", "llama-6.7b"),
            "llama-13b": ("llama-1-13b",),
            "llama-30b": ("llama-33b", "llama-1-33b"),
            "llama-65b": ("llama-1-65b",),
            "llama-3.1-405b": ("llama-3-405b",),
            "codellama-34b": ("code-llama-34b",),
            "tinyllama-1.1b": ("tinyllama",),
        },
        **LLAMA,
    ),
    *family(
        "Llama",
        _CONFIG,
        _COLUMNS,
        {
            "llama-3.2-1b": (16, 2048, 8192, 32, 8, 128256, 8192, 1.236),
            "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128256, 8192, 3.213),
        },
        **LLAMA | {"tied": True},
    ),
    *family(
        "Llama",
        "MaxText: configs/models/llama4-17b-16e.yml, llama4-17b-128e.yml",
        "experts moe_every ffn",
        {
            "llama-4-scout": (16, 1, 16384, 107.8),
            "llama-4-maverick": (128, 2, 16384, 400.7),
        },
        also={
            "llama-4-scout": ("llama-4-scout-17b-16e", "llama-4-17b-16e"),
            "llama-4-maverick": ("llama-4-maverick-17b-128e", "llama-4-17b-128e"),
        },
        layers=48,
        hidden=5120,
        heads=40,
        kv_heads=8,
        vocab=202048,
        seq=8192,
        top_k=1,
        expert_ffn=8192,
        shared_experts=1,
        window=8192,
        full_every=4,
        **LLAMA,
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
            "mistral-small-22b": (56, 6144, 16384, 48, 8, 32768, 8192, 128, None, 22.247),
            "mistral-small-24b": (40, 5120, 32768, 32, 8, 131072, 8192, 128, None, 23.572),
            "mistral-large-123b": (88, 12288, 28672, 96, 8, 32768, 8192, 128, None, 122.610),
            "codestral-22b": (56, 6144, 16384, 48, 8, 32768, 8192, 128, None, 22.247),
        },
        also={
            "mistral-nemo-12b": ("mistral-nemo", "mistral-nemo-2407"),
            "mistral-small-22b": ("mistral-small-2409",),
            "mistral-small-24b": ("mistral-small-3", "mistral-small-24b-2501"),
            "mistral-large-123b": ("mistral-large-2", "mistral-large-2407", "mistral-large"),
            "codestral-22b": ("codestral",),
        },
        **LLAMA,
    ),
    *family(
        "Mistral",
        "arXiv:2401.04088, table 1; config.json",
        _COLUMNS,
        {
            "mixtral-8x7b": (32, 4096, 14336, 32, 8, 32000, 4096, 46.703),
            "mixtral-8x22b": (56, 6144, 16384, 48, 8, 32768, 4096, 140.630),
        },
        experts=8,
        top_k=2,
        **LLAMA,
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
        **LLAMA,
    ),
    *family(
        "InternLM",
        _CONFIG,
        _COLUMNS,
        {
            "internlm2-7b": (32, 4096, 14336, 32, 8, 92544, 4096, 7.738),
            "internlm2-20b": (48, 6144, 16384, 48, 8, 92544, 4096, 19.861),
        },
        **LLAMA,
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
        **LLAMA,
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
        **LLAMA,
    ),
    *family(
        "OLMo", _CONFIG, _COLUMNS, {"olmo-1b": (16, 2048, 8192, 16, 16, 50304, 2048, 1.177)}, **LLAMA | {"tied": True}
    ),
    *family(
        "Phi",
        _CONFIG,
        _COLUMNS,
        {
            "phi-3-mini": (32, 3072, 8192, 32, 32, 32064, 4096, 3.821),
            "phi-3-medium": (40, 5120, 17920, 40, 10, 32064, 4096, 13.960),
            "phi-4": (40, 5120, 17920, 40, 10, 100352, 4096, 14.660),
        },
        also={"phi-3-mini": ("phi-3-3.8b", "phi-3.5-mini"), "phi-3-medium": ("phi-3-14b",), "phi-4": ("phi-4-14b",)},
        **LLAMA,
    ),
    *family(
        "Phi", _CONFIG, _COLUMNS, {"phi-4-mini": (32, 3072, 8192, 24, 8, 200064, 4096, 3.836)}, **LLAMA | {"tied": True}
    ),
    *family(
        "Granite",
        _CONFIG,
        _COLUMNS,
        {
            "granite-3-2b": (40, 2048, 8192, 32, 8, 49155, 4096, 2.534),
            "granite-3-8b": (40, 4096, 12800, 32, 8, 49155, 4096, 8.171),
        },
        also={"granite-3-2b": ("granite-3.0-2b",), "granite-3-8b": ("granite-3.0-8b",)},
        **LLAMA | {"tied": True},
    ),
    *family(
        "SmolLM",
        _CONFIG,
        _COLUMNS,
        {
            "smollm-135m": (30, 576, 1536, 9, 3, 49152, 2048, 0.1345),
            "smollm-360m": (32, 960, 2560, 15, 5, 49152, 2048, 0.3618),
            "smollm-1.7b": (24, 2048, 8192, 32, 32, 49152, 2048, 1.711),
            "smollm3-3b": (36, 2048, 11008, 16, 4, 128256, 4096, 3.075),
        },
        also={name: (name.replace("smollm", "smollm2"),) for name in ("smollm-135m", "smollm-360m", "smollm-1.7b")},
        **LLAMA | {"tied": True},
    ),
    *family(
        "Command R",
        _CONFIG,
        _COLUMNS,
        {
            "command-r-35b": (40, 8192, 22528, 64, 64, 256000, 8192, 34.981),
            "command-r-plus-104b": (64, 12288, 33792, 96, 8, 256000, 8192, 103.811),
        },
        also={"command-r-35b": ("command-r",), "command-r-plus-104b": ("command-r-plus",)},
        parallel=True,
        **LLAMA | {"tied": True},
    ),
)

_EXPERTS: tuple[KnownModel, ...] = (
    *family(
        "Grok",
        "xai-org/grok-1: run.py",
        f"{_COLUMNS} experts top_k",
        {"grok-1": (64, 6144, 32768, 48, 8, 131072, 8192, 8, 2, 314)},
        also={"grok-1": ("grok-1-314b",)},
        head_dim=128,
        **LLAMA | {"tied": True},
    ),
    *family(
        "DBRX",
        _CONFIG,
        f"{_COLUMNS} experts top_k",
        {"dbrx": (40, 6144, 10752, 48, 8, 100352, 32768, 16, 4, 131.6)},
        also={"dbrx": ("dbrx-132b",)},
        **LLAMA,
    ),
    *family(
        "Arctic",
        "config.json; its dense part stands beside every mixture, as a shared expert",
        f"{_COLUMNS} experts top_k shared_ffn",
        {"arctic-480b": (35, 7168, 4864, 56, 8, 32000, 4096, 128, 2, 7168, 480)},
        also={"arctic-480b": ("arctic", "snowflake-arctic")},
        **LLAMA,
    ),
    *family(
        "OLMo",
        "arXiv:2409.02060, table 10",
        f"{_COLUMNS} experts top_k",
        {"olmoe-1b-7b": (16, 2048, 1024, 16, 16, 50304, 4096, 64, 8, 6.919)},
        also={"olmoe-1b-7b": ("olmoe",)},
        **LLAMA,
    ),
    *family(
        "Phi",
        _CONFIG,
        f"{_COLUMNS} experts top_k",
        {"phi-3.5-moe": (32, 4096, 6400, 32, 8, 32064, 4096, 16, 2, 41.873)},
        **LLAMA,
    ),
)

MODELS: tuple[KnownModel, ...] = (*_META, *_MISTRAL, *_DENSE, *_EXPERTS)
