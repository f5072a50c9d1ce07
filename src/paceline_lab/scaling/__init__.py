"""Benchmarks: one job under several plans, in interleaved rounds, with intervals and limits."""
