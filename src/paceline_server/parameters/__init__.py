"""Parameter server: processes that own parameters, and clients that join and leave.

Read `log.py` (the replicated log of operations, which survives the loss of a server), then `machine.py` (the effect of
each operation, without sockets), then `process.py` (the server process) and `client.py` (the client).
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
