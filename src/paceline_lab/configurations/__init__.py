"""Configurations of other systems: Megatron-LM, DeepSpeed, torchtitan, Accelerate; read, planned and written.

Read `configuration.py` first: what every system says in its own words. Each has a file with its reader and its writer.
"""
