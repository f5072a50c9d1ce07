"""BERT and its kin, and T5's encoders with decoders."""

from __future__ import annotations

from paceline.job.known.entry import KnownModel, family

_T5 = "arXiv:1910.10683, §3.7; config.json"
_COLUMNS = "layers hidden ffn heads head_dim vocab"

_BERT: tuple[KnownModel, ...] = (
    *family(
        "BERT",
        "arXiv:1810.04805, §3; its head predicts 15 % of the tokens",
        "layers hidden heads",
        {"bert-base": (12, 768, 12, 0.1101), "bert-large": (24, 1024, 16, 0.3362)},
        vocab=30522,
        seq=512,
        positions=512,
        segments=2,
        predicted=0.15,
        pooled=True,
        causal=False,
    ),
    *family(
        "BERT",
        "arXiv:1907.11692; arXiv:1911.02116; arXiv:1910.01108; config.json",
        "layers hidden heads vocab positions seq",
        {
            "distilbert": (6, 768, 12, 30522, 512, 512, 0.0670),
            "roberta-base": (12, 768, 12, 50265, 514, 512, 0.1247),
            "roberta-large": (24, 1024, 16, 50265, 514, 512, 0.3554),
            "xlm-roberta-base": (12, 768, 12, 250002, 514, 512, 0.2785),
            "xlm-roberta-large": (24, 1024, 16, 250002, 514, 512, 0.5601),
        },
        also={"distilbert": ("distilbert-base",)},
        segments=1,
        predicted=0.15,
        causal=False,
    ),
)


def _both(rows: dict[str, tuple[float | None, ...]]) -> dict[str, tuple[float | None, ...]]:
    """Rows with as many layers of the encoder as of the decoder."""
    return {name: (row[0], *row) for name, row in rows.items()}


_ENCODER_DECODER: tuple[KnownModel, ...] = (
    *family(
        "T5",
        _T5,
        f"encoder_layers {_COLUMNS}",
        _both(
            {
                "t5-small": (6, 512, 2048, 8, 64, 32128, 0.0605),
                "t5-base": (12, 768, 3072, 12, 64, 32128, 0.2229),
                "t5-large": (24, 1024, 4096, 16, 64, 32128, 0.7377),
                "t5-3b": (24, 1024, 16384, 32, 128, 32128, 2.8516),
                "t5-11b": (24, 1024, 65536, 128, 128, 32128, 11.3073),
            }
        ),
        biases="none",
        positions=False,
        seq=512,
    ),
    *family(
        "T5",
        "released_checkpoints.md of its repository; arXiv:2010.11934; arXiv:2205.05131",
        f"encoder_layers {_COLUMNS}",
        _both(
            {
                "t5-v1.1-small": (8, 512, 1024, 6, 64, 32128, 0.0770),
                "t5-v1.1-base": (12, 768, 2048, 12, 64, 32128, 0.2476),
                "t5-v1.1-large": (24, 1024, 2816, 16, 64, 32128, 0.7831),
                "t5-v1.1-xl": (24, 2048, 5120, 32, 64, 32128, 2.8497),
                "t5-v1.1-xxl": (24, 4096, 10240, 64, 64, 32128, 11.135),
                "mt5-small": (8, 512, 1024, 6, 64, 250112, 0.3002),
                "mt5-base": (12, 768, 2048, 12, 64, 250112, 0.5824),
                "mt5-large": (24, 1024, 2816, 16, 64, 250112, 1.2295),
                "mt5-xl": (24, 2048, 5120, 32, 64, 250112, 3.7428),
                "mt5-xxl": (24, 4096, 10240, 64, 64, 250112, 12.9213),
                "ul2-20b": (32, 4096, 16384, 16, 256, 32128, 19.46),
            }
        ),
        also={
            **{
                f"t5-v1.1-{size}": (f"flan-t5-{size}", f"t5-1.1-{size}")
                for size in ("small", "base", "large", "xl", "xxl")
            },
            "ul2-20b": ("ul2", "flan-ul2"),
        },
        gated=True,
        tied=False,
        positions=False,
        seq=512,
    ),
)

_NEMO: tuple[KnownModel, ...] = (
    *family(
        "BERT",
        "NVIDIA/NeMo-Framework-Launcher: conf/training/bert",
        "layers hidden heads",
        {"bert-4b": (48, 2560, 32, None), "bert-20b": (48, 6144, 96, None)},
        vocab=30592,
        seq=512,
        segments=2,
        predicted=0.15,
        pooled=True,
        causal=False,
    ),
    *family(
        "T5",
        "NVIDIA/NeMo-Framework-Launcher: conf/training/t5",
        f"encoder_layers {_COLUMNS}",
        _both(
            {
                "nemo-t5-3b": (24, 2048, 5120, 32, 64, 29184, 2.8),
                "nemo-t5-11b": (24, 4096, 10240, 64, 64, 29184, 11),
                "t5-23b": (36, 5120, 10880, 80, 64, 29184, None),
                "t5-41b": (48, 6144, 10880, 96, 64, 29184, 41),
            }
        ),
        also={"t5-23b": ("nemo-t5-23b",), "t5-41b": ("nemo-t5-41b",)},
        gated=True,
        biases="all",
        positions=512,
        seq=128,
        source_seq=512,
    ),
)

_TRANSLATION: tuple[KnownModel, ...] = family(
    "Transformer",
    "arXiv:1706.03762, table 3, with 37,000 tokens of both languages",
    "layers encoder_layers hidden ffn heads",
    {"transformer-big": (6, 6, 1024, 4096, 16, 0.213)},
    vocab=37000,
    seq=256,
    positions=False,
)

MODELS: tuple[KnownModel, ...] = (*_BERT, *_ENCODER_DECODER, *_NEMO, *_TRANSLATION)
