"""Every example runs, from a folder that is no checkout, and does what its first lines say."""

from __future__ import annotations
