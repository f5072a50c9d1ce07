"""Description of `sync=majority`, which loads no torch."""

from paceline.planning.sync_info import Argument, SyncInfo, between

INFO = SyncInfo(
    "majority:Majority",
    exact=False,
    every_step=True,
    sends="gradients",
    arguments={"": Argument(between(0, 1, open_below=True), 0.01, "the size of every step, above 0 and at most 1")},
)
