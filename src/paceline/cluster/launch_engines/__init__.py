"""Launch engines: what started this process, and which host or rank it is.

Read `engine.py` first (what an engine answers), then `own.py` (which one started this process). There is one file per
engine; `by_hand.py` is the shortest.
"""

from paceline.cluster.launch_engines.engine import HostPlace, LaunchEngine
from paceline.cluster.launch_engines.own import ENGINES, is_rank, own_engine

__all__ = ["ENGINES", "HostPlace", "LaunchEngine", "is_rank", "own_engine"]
