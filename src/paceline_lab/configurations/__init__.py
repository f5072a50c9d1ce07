"""Configurations of other systems: Megatron-LM, DeepSpeed, torchtitan and Accelerate.

Read `configuration.py` first: it has the parts that all configurations share. Each system has a file with a reader and
a writer.
"""
