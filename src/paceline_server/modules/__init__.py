"""Modules, objects and optimizers that live in another process, and autograd through them.

Read `module` (a remote module as its user sees it, with autograd over the wire), then `serve` and `served_module` (the
process where they live); `held` has what that process keeps for its clients.
"""
