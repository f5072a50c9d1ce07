"""Configurations of other systems: Megatron-LM, DeepSpeed, torchtitan and Accelerate.

Read `configuration.py` first: what all configurations have in common. Each system has a file with a reader and a
writer.
"""
