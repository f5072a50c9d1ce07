"""Gradient compression: codecs, sums of coded tensors with error feedback, and their choice."""

from paceline.sync.compress.choice import CodecChooser
from paceline.sync.compress.codecs import Codec, Coding
from paceline.sync.compress.compressor import Compressor, SumCoder

__all__ = ["Codec", "CodecChooser", "Coding", "Compressor", "SumCoder"]
