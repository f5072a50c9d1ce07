"""Catalogue of language models with published dimensions, by name."""
