"""Measured runs of a user, which correct predictions of other plans.

Read `calibrate_on.py` first; `logs.py` reads what Megatron-LM and torchtitan print.
"""
