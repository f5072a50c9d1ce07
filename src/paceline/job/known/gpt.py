"""GPT, BERT, T5 and models in their shapes.

OPT, BLOOM, Pythia, Falcon, MPT, PaLM, Megatron's series, StarCoder and others.
"""

from __future__ import annotations

from typing import Any

from paceline.job.known import KnownModel, family

_CONFIG = "config.json of the model's Hugging Face repository"
_COLUMNS = "layers hidden heads"

_OPENAI: tuple[KnownModel, ...] = (
    *family(
        "GPT",
        "Radford et al., 2018; config.json",
        _COLUMNS,
        {"gpt-1": (12, 768, 12, 0.1165, "openai-gpt")},
        {"vocab": 40478, "seq": 512},
    ),
    *family(
        "GPT",
        "Radford et al., 2019, table 2; config.json",
        _COLUMNS,
        {
            "gpt-2": (12, 768, 12, 0.1244, "gpt-2-small gpt-2-124m"),
            "gpt-2-medium": (24, 1024, 16, 0.3548, "gpt-2-345m gpt-2-355m"),
            "gpt-2-large": (36, 1280, 20, 0.7740, "gpt-2-774m"),
            "gpt-2-xl": (48, 1600, 25, 1.5576, "gpt-2-1.5b"),
        },
        {"vocab": 50257, "seq": 1024},
    ),
    *family(
        "GPT",
        "arXiv:2005.14165, table 2.1; widths that its numbers of heads divide",
        _COLUMNS,
        {
            "gpt-3-125m": (12, 768, 12, 0.125, "gpt-3-small gpt-3-126m"),
            "gpt-3-350m": (24, 1024, 16, 0.356, "gpt-3-medium"),
            "gpt-3-760m": (24, 1536, 16, 0.760, "gpt-3-large"),
            "gpt-3-1.3b": (24, 2048, 16, 1.316, "gpt-3-xl"),
            "gpt-3-2.7b": (32, 2560, 32, 2.65),
            "gpt-3-6.7b": (32, 4096, 32, 6.66),
            "gpt-3-13b": (40, 5120, 40, 12.85),
            "gpt-3-175b": (96, 12288, 96, 174.6, "gpt-3 gpt-175b"),
        },
        {"vocab": 50257, "seq": 2048},
    ),
)

_MEGATRON: tuple[KnownModel, ...] = (
    *family(
        "Megatron",
        "arXiv:2104.04473, table 1; arXiv:2205.05198, table 3; arXiv:1909.08053, table 2; arXiv:2201.11990",
        _COLUMNS,
        {
            "megatron-1.7b": (24, 2304, 24, 1.7, "gpt-1.7b megatron-gpt-1.7b megatron-lm-1.7b"),
            "megatron-3.6b": (30, 3072, 32, 3.6, "gpt-3.6b megatron-gpt-3.6b megatron-lm-3.6b"),
            "megatron-7.5b": (36, 4096, 32, 7.5, "gpt-7.5b megatron-gpt-7.5b megatron-lm-7.5b"),
            "megatron-8.3b": (72, 3072, 32, 8.3, "gpt-8.3b megatron-gpt-8.3b megatron-lm-8.3b"),
            "megatron-18b": (40, 6144, 48, 18.4, "gpt-18b megatron-gpt-18b megatron-lm-18b"),
            "megatron-22b": (48, 6144, 64, 22, "gpt-22b megatron-gpt-22b megatron-lm-22b"),
            "megatron-39b": (48, 8192, 64, 39.1, "gpt-39b megatron-gpt-39b megatron-lm-39b"),
            "megatron-76b": (60, 10240, 80, 76.1, "gpt-76b megatron-gpt-76b megatron-lm-76b"),
            "megatron-145b": (80, 12288, 96, 145.6, "gpt-145b megatron-gpt-145b megatron-lm-145b"),
            "megatron-310b": (96, 16384, 128, 310.1, "gpt-310b megatron-gpt-310b megatron-lm-310b"),
            "megatron-530b": (105, 20480, 128, 529.6, "gpt-530b mt-nlg-530b mt-nlg turing-530b turing-nlg-530b"),
            "megatron-1t": (128, 25600, 160, 1008, "gpt-1t megatron-gpt-1t megatron-lm-1t"),
        },
        {"vocab": 51200, "seq": 2048},
    ),
    *family(
        "Megatron",
        "NeMo: llm/gpt/model/base.py; alpa: benchmark/alpa/suite_paper_manual_gpt.py",
        _COLUMNS,
        {
            "gpt-3-5b": (24, 4096, 32, None, "gpt-5b"),
            "gpt-3-20b": (44, 6144, 48, None, "gpt-20b"),
            "gpt-3-40b": (48, 8192, 64, None, "gpt-40b"),
            "gpt-15b": (48, 5120, 40, None),
        },
        {"vocab": 51200, "seq": 2048},
    ),
    *family(
        "MPT",
        "mosaicml/llm-foundry: scripts/train/yamls/pretrain/mpt-*.yaml",
        _COLUMNS,
        {
            "mpt-125m": (12, 768, 12, 0.1253),
            "mpt-350m": (24, 1024, 16, 0.3560),
            "mpt-760m": (24, 1536, 12, 0.7605),
            "mpt-1b": (24, 2048, 16, 1.3160),
            "mpt-3b": (32, 2560, 20, 2.6518),
            "mpt-7b": (32, 4096, 32, 6.6589),
            "mpt-13b": (40, 5120, 40, 12.8540),
            "mpt-30b": (48, 7168, 56, 29.9752),
            "mpt-70b": (80, 8192, 64, 64.8624),
        },
        {"vocab": 50368, "seq": 2048, "biases": "none"},
    ),
)

_OPEN: tuple[KnownModel, ...] = (
    *family(
        "GPT-J and GPT-NeoX",
        "arXiv:2204.06745, §2; config.json",
        f"{_COLUMNS} vocab",
        {"gpt-j-6b": (28, 4096, 16, 50400, 6.053, "gpt-j"), "gpt-neox-20b": (44, 6144, 64, 50432, 20.555)},
        {"parallel": True, "tied": False, "positions": False, "seq": 2048},
        also={"gpt-neox-20b": "gpt-neox neox-20b"},
    ),
    *family(
        "Pythia",
        "arXiv:2304.01373, table 1; config.json",
        f"{_COLUMNS} vocab",
        {
            "pythia-70m": (6, 512, 8, 50304, 0.0704),
            "pythia-160m": (12, 768, 12, 50304, 0.1623),
            "pythia-410m": (24, 1024, 16, 50304, 0.4053),
            "pythia-1b": (16, 2048, 8, 50304, 1.0118),
            "pythia-1.4b": (24, 2048, 16, 50304, 1.4147),
            "pythia-2.8b": (32, 2560, 32, 50304, 2.7752),
            "pythia-6.9b": (32, 4096, 32, 50432, 6.8573),
            "pythia-12b": (36, 5120, 40, 50688, 11.8461),
        },
        {"parallel": True, "tied": False, "positions": False, "seq": 2048},
    ),
    *family(
        "OPT",
        "arXiv:2205.01068, table 1; config.json",
        _COLUMNS,
        {
            "opt-125m": (12, 768, 12, 0.1252),
            "opt-1.3b": (24, 2048, 32, 1.3158),
            "opt-2.7b": (32, 2560, 32, 2.6516),
            "opt-6.7b": (32, 4096, 32, 6.6585),
            "opt-13b": (40, 5120, 40, 12.8530),
            "opt-30b": (48, 7168, 56, 29.975),
            "opt-66b": (64, 9216, 72, 65.718),
            "opt-175b": (96, 12288, 96, 174.6),
        },
        {"vocab": 50272, "seq": 2048},
    ),
    *family(
        "BLOOM",
        "arXiv:2211.05100, table 3",
        _COLUMNS,
        {
            "bloom-560m": (24, 1024, 16, 0.559),
            "bloom-1b1": (24, 1536, 16, 1.065, "bloom-1.1b"),
            "bloom-1b7": (24, 2048, 16, 1.722),
            "bloom-3b": (30, 2560, 32, 3.003),
            "bloom-7b1": (30, 4096, 32, 7.069, "bloom-7.1b"),
            "bloom-176b": (70, 14336, 112, 176.247, "bloom"),
        },
        {"vocab": 250880, "seq": 2048, "positions": False},
    ),
    *family(
        "Falcon",
        "arXiv:2311.16867, table 16; config.json",
        f"{_COLUMNS} kv_heads",
        {
            "falcon-7b": (32, 4544, 71, 1, 6.92),
            "falcon-40b": (60, 8192, 128, 8, 41.3),
            "falcon-180b": (80, 14848, 232, 8, 178.6),
        },
        {"vocab": 65024, "seq": 2048, "parallel": True, "positions": False, "biases": "none"},
    ),
    *family(
        "StarCoder",
        "arXiv:2305.06161, table 6; arXiv:2402.19173, table 5; config.json",
        f"{_COLUMNS} kv_heads positions tied",
        {
            "starcoder": (40, 6144, 48, 1, True, True, 15.517, "starcoder-15b starcoder-15.5b"),
            "starcoder2-3b": (30, 3072, 24, 2, False, True, 3.030),
            "starcoder2-7b": (32, 4608, 36, 4, False, True, 7.174),
            "starcoder2-15b": (40, 6144, 48, 4, False, False, 15.958),
            "granite-20b-code": (52, 6144, 48, 1, True, True, 20.074, "granite-20b"),
        },
        {"vocab": 49152, "seq": 8192},
    ),
    *family(
        "Phi",
        _CONFIG,
        _COLUMNS,
        {"phi-1.5": (24, 2048, 32, 1.418), "phi-2": (32, 2560, 32, 2.780)},
        {"vocab": 51200, "seq": 2048, "parallel": True, "tied": False, "positions": False},
    ),
)

_GOOGLE: tuple[KnownModel, ...] = (
    *family(
        "PaLM",
        "arXiv:2204.02311, table 1",
        _COLUMNS,
        {"palm-8b": (32, 4096, 16, 8.63), "palm-62b": (64, 8192, 32, 62.50), "palm-540b": (118, 18432, 48, 540.35)},
        {
            "kv_heads": 1,
            "head_dim": 256,
            "vocab": 256000,
            "seq": 2048,
            "gated": True,
            "parallel": True,
            "positions": False,
        },
        also={"palm-540b": "palm"},
    ),
    *family(
        "LaMDA and GLaM",
        "arXiv:2201.08239, §3",
        _COLUMNS,
        {"lamda-137b": (64, 8192, 128, 137.4, "lamda")},
        {"head_dim": 128, "ffn": 65536, "vocab": 32000, "seq": 1024, "gated": True, "positions": False},
    ),
    *family(
        "LaMDA and GLaM",
        "arXiv:2112.06905, table 4; the gates of its dense layers are left out",
        _COLUMNS,
        {"glam-1.2t": (64, 8192, 128, 1162, "glam glam-64b-64e")},
        {
            "head_dim": 128,
            "ffn": 32768,
            "experts": 64,
            "top_k": 2,
            "moe_every": 2,
            "vocab": 256000,
            "seq": 1024,
            "biases": "none",
            "positions": False,
        },
    ),
)

_T5 = "arXiv:1910.10683, §3.7; config.json"
_T5_COLUMNS = "layers hidden ffn heads head_dim vocab"

_BERT: tuple[KnownModel, ...] = (
    *family(
        "BERT",
        "arXiv:1810.04805, §3; its head predicts 15 % of the tokens",
        "layers hidden heads",
        {"bert-base": (12, 768, 12, 0.1101), "bert-large": (24, 1024, 16, 0.3362)},
        {
            "vocab": 30522,
            "seq": 512,
            "positions": 512,
            "segments": 2,
            "predicted": 0.15,
            "pooled": True,
            "causal": False,
        },
    ),
    *family(
        "BERT",
        "arXiv:1907.11692; arXiv:1911.02116; arXiv:1910.01108; config.json",
        "layers hidden heads vocab positions seq",
        {
            "distilbert": (6, 768, 12, 30522, 512, 512, 0.0670, "distilbert-base"),
            "roberta-base": (12, 768, 12, 50265, 514, 512, 0.1247),
            "roberta-large": (24, 1024, 16, 50265, 514, 512, 0.3554),
            "xlm-roberta-base": (12, 768, 12, 250002, 514, 512, 0.2785),
            "xlm-roberta-large": (24, 1024, 16, 250002, 514, 512, 0.5601),
        },
        {"segments": 1, "predicted": 0.15, "causal": False},
    ),
)


def _both(rows: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Rows with as many layers of the encoder as of the decoder."""
    return {name: (row[0], *row) for name, row in rows.items()}


_ENCODER_DECODER: tuple[KnownModel, ...] = (
    *family(
        "T5",
        _T5,
        f"encoder_layers {_T5_COLUMNS}",
        _both(
            {
                "t5-small": (6, 512, 2048, 8, 64, 32128, 0.0605),
                "t5-base": (12, 768, 3072, 12, 64, 32128, 0.2229),
                "t5-large": (24, 1024, 4096, 16, 64, 32128, 0.7377),
                "t5-3b": (24, 1024, 16384, 32, 128, 32128, 2.8516),
                "t5-11b": (24, 1024, 65536, 128, 128, 32128, 11.3073),
            }
        ),
        {"biases": "none", "positions": False, "seq": 512},
    ),
    *family(
        "T5",
        "released_checkpoints.md of its repository; arXiv:2010.11934; arXiv:2205.05131",
        f"encoder_layers {_T5_COLUMNS}",
        _both(
            {
                "t5-v1.1-small": (8, 512, 1024, 6, 64, 32128, 0.0770, "flan-t5-small t5-1.1-small"),
                "t5-v1.1-base": (12, 768, 2048, 12, 64, 32128, 0.2476, "flan-t5-base t5-1.1-base"),
                "t5-v1.1-large": (24, 1024, 2816, 16, 64, 32128, 0.7831, "flan-t5-large t5-1.1-large"),
                "t5-v1.1-xl": (24, 2048, 5120, 32, 64, 32128, 2.8497, "flan-t5-xl t5-1.1-xl"),
                "t5-v1.1-xxl": (24, 4096, 10240, 64, 64, 32128, 11.135, "flan-t5-xxl t5-1.1-xxl"),
                "mt5-small": (8, 512, 1024, 6, 64, 250112, 0.3002),
                "mt5-base": (12, 768, 2048, 12, 64, 250112, 0.5824),
                "mt5-large": (24, 1024, 2816, 16, 64, 250112, 1.2295),
                "mt5-xl": (24, 2048, 5120, 32, 64, 250112, 3.7428),
                "mt5-xxl": (24, 4096, 10240, 64, 64, 250112, 12.9213),
                "ul2-20b": (32, 4096, 16384, 16, 256, 32128, 19.46, "ul2 flan-ul2"),
            }
        ),
        {"gated": True, "tied": False, "positions": False, "seq": 512},
    ),
)

_NEMO: tuple[KnownModel, ...] = (
    *family(
        "BERT",
        "NVIDIA/NeMo-Framework-Launcher: conf/training/bert",
        "layers hidden heads",
        {"bert-4b": (48, 2560, 32, None), "bert-20b": (48, 6144, 96, None)},
        {"vocab": 30592, "seq": 512, "segments": 2, "predicted": 0.15, "pooled": True, "causal": False},
    ),
    *family(
        "T5",
        "NVIDIA/NeMo-Framework-Launcher: conf/training/t5",
        f"encoder_layers {_T5_COLUMNS}",
        _both(
            {
                "nemo-t5-3b": (24, 2048, 5120, 32, 64, 29184, 2.8),
                "nemo-t5-11b": (24, 4096, 10240, 64, 64, 29184, 11),
                "t5-23b": (36, 5120, 10880, 80, 64, 29184, None, "nemo-t5-23b"),
                "t5-41b": (48, 6144, 10880, 96, 64, 29184, 41, "nemo-t5-41b"),
            }
        ),
        {"gated": True, "biases": "all", "positions": 512, "seq": 128, "source_seq": 512},
    ),
)

_TRANSLATION: tuple[KnownModel, ...] = family(
    "Transformer",
    "arXiv:1706.03762, table 3, with 37,000 tokens of both languages",
    "layers encoder_layers hidden ffn heads",
    {"transformer-big": (6, 6, 1024, 4096, 16, 0.213)},
    {"vocab": 37000, "seq": 256, "positions": False},
)

MODELS: tuple[KnownModel, ...] = (
    *_OPENAI,
    *_MEGATRON,
    *_OPEN,
    *_GOOGLE,
    *_BERT,
    *_ENCODER_DECODER,
    *_NEMO,
    *_TRANSLATION,
)
