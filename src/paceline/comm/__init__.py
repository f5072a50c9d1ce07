"""Communication between processes: groups of ranks, their collectives, and the rendezvous."""

from paceline.comm.group import Group

__all__ = ["Group"]
