"""Gradient compression: codecs, compressed sums with error feedback, and the automatic choice of a codec."""

from paceline.sync.compress.choice import CodecChooser
from paceline.sync.compress.codecs import Codec, Coding
from paceline.sync.compress.compressor import Compressor, SumCoder

__all__ = ["Codec", "CodecChooser", "Coding", "Compressor", "SumCoder"]
