"""Measurement: the same job under several plans, interleaved, with intervals, and what holds it back."""
