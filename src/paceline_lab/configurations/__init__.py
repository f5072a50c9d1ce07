"""Configurations of other systems: Megatron-LM, DeepSpeed, torchtitan and Accelerate.

Read `configuration.py` first: it contains what all systems share. Each system has its own file with a reader and a
writer.
"""
