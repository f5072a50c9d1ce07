"""Traces of image models from their published shapes alone: no module, no torch."""
