"""Benchmarks that run one job under several plans in interleaved rounds."""
