"""Bytes between processes: the groups of ranks that collectives run over, and how ranks find each other."""

from paceline.comm.group import Group

__all__ = ["Group"]
