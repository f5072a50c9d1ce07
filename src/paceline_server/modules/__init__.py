"""Modules, objects and optimizers that live in another process, and autograd through them.

Read `module` (a remote module from the user's view, with autograd over the wire), then `serve` and `served_module` (the
serving process). `held` has the objects that the serving process keeps for its clients.
"""
