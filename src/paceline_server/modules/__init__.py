"""Modules, objects and optimizers that live in another process, and autograd through them.

Read `module` (a remote module as its user sees it), `autograd` (forward and backward over the wire), then `serve` and
`served_module` (the process where they live); `lanes` is why a call that is repeated runs once.
"""
