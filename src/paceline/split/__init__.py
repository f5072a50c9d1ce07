"""One model over many devices: one file per way to divide it, put together by `apply`."""
