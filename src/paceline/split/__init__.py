"""Splits of a model over a replica's ranks: fsdp, tp, pp, cp and ep."""
