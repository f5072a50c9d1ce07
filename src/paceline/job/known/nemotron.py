"""Nemotron, dense and hybrid, and the models of Megatron's own tests."""

from __future__ import annotations

from paceline.job.known.entry import LLAMA, KnownModel, family

_DENSE: tuple[KnownModel, ...] = family(
    "Nemotron",
    "arXiv:2402.16819, table 1; arXiv:2406.11704, table 1; arXiv:2407.14679; NeMo: llm/gpt/model/nemotron.py",
    "layers hidden ffn heads kv_heads",
    {
        "minitron-4b": (32, 3072, 9216, 24, 8, 4.19),
        "nemotron-3-8b": (32, 4096, 16384, 32, 32, 8.54),
        "nemotron-3-22b": (40, 6144, 24576, 48, 48, 21.3),
        "nemotron-4-15b": (32, 6144, 24576, 48, 8, 15.6),
        "nemotron-4-340b": (96, 18432, 73728, 96, 8, 341),
    },
    also={
        "minitron-4b": ("nemotron-4b", "nemotron-mini-4b"),
        "nemotron-4-15b": ("nemotron-15b", "gpt3-15b-8t"),
        "nemotron-4-340b": ("nemotron-340b",),
        "nemotron-3-8b": ("nemotron-8b",),
        "nemotron-3-22b": ("nemotron-22b",),
    },
    vocab=256000,
    seq=4096,
    tied=False,
    positions=False,
    biases="none",
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
            "nemotron-h-8b": (len(_8B), _8B, 4096, _mamba(128, 128), 21504, 32, 128, 8.1),
            "nemotron-h-47b": (len(_47B), _47B, 8192, _mamba(256, 256), 30720, 64, 128, 46.8),
            "nemotron-h-56b": (len(_56B), _56B, 8192, _mamba(256, 256), 32768, 64, 128, 56.3),
            "nemotron-nano-9b-v2": (len(_9B), _9B, 4480, _mamba(128, 128, 80), 15680, 40, 128, 8.89),
            "nemotron-nano-12b-v2": (len(_12B), _12B, 5120, _mamba(128, 128, 80), 20480, 40, 128, 12.31),
        },
        also={
            "nemotron-h-8b": ("nemotronh-8b",),
            "nemotron-h-47b": ("nemotronh-47b",),
            "nemotron-h-56b": ("nemotronh-56b",),
        },
        kv_heads=8,
        vocab=131072,
        seq=8192,
        tied=False,
        positions=False,
        biases="none",
        dropout=False,
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
        also={
            "nemotron-3-nano": ("nemotron-3-nano-30b-a3b", "nemotron-3-nano-30b"),
            "nemotron-3-ultra": ("nemotron-3-ultra-550b-a55b", "nemotron-3-ultra-550b"),
            "nemotron-3.5-lightning": ("nemotron35-lightning",),
            "nemotron-3.5-lightning-no-load-optim": ("nemotron35-lightning-no-load-optim",),
            "nemotron-3-super": ("nemotron-3-super-120b-a12b", "nemotron-3-super-120b"),
        },
        kv_heads=2,
        tied=False,
        positions=False,
        biases="none",
        dropout=False,
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
        also={"gpt3-7b-memory-speed": ("gpt3-7b-tp1-pp4-memory-speed", "gpt3-7b-tp4-pp1-memory-speed")},
        seq=8192,
        tied=False,
    ),
    *family(
        "Megatron's tests",
        "NVIDIA/Megatron-LM: model_config.yaml of functional test deepseekv3_proxy_*",
        "layers hidden ffn heads experts top_k expert_ffn shared_experts dense_layers vocab mtp",
        {"deepseek-v3-proxy": (14, 7168, 18432, 128, 64, 8, 2048, 1, 3, 256000, 1, None)},
        mla={"q_rank": 1536, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128},
        seq=4096,
        **LLAMA,
    ),
    *family(
        "Megatron's tests",
        "NVIDIA/Megatron-LM: model_config.yaml of functional test t5_11b_mcore_tp4_pp1",
        "layers encoder_layers hidden ffn heads",
        {"t5-11b-mcore": (24, 24, 4096, 10240, 64, None)},
        head_dim=64,
        vocab=29184,
        seq=128,
        source_seq=512,
        positions=512,
    ),
)

MODELS: tuple[KnownModel, ...] = (*_DENSE, *_HYBRID, *_TESTS)
