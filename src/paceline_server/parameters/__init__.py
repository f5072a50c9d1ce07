"""A parameter server: a process that owns parameters, and clients that come and go.

Read `log.py` (the replicated log of operations, which survives the loss of a server), then `machine.py` (the effect of
each operation, without sockets), then `process.py` and `client.py` (the two ends).
"""

from paceline_server.parameters.client import Pulled, Pushed, ServerClient
from paceline_server.parameters.log import View, Views
from paceline_server.parameters.machine import Ticket
from paceline_server.parameters.process import ParameterServer
from paceline_server.parameters.settings import ServerSettings, TensorSpec

__all__ = [
    "ParameterServer",
    "Pulled",
    "Pushed",
    "ServerClient",
    "ServerSettings",
    "TensorSpec",
    "Ticket",
    "View",
    "Views",
]
