"""Fewer bytes for the same sum: codecs, the exchange that adds coded tensors up and remembers what they lost, and when that pays."""

from paceline.sync.compress.choice import Choice
from paceline.sync.compress.compressor import Compressor

__all__ = ["Choice", "Compressor"]
