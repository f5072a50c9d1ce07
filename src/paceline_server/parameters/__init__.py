"""A parameter server: a process that owns parameters, and clients that come and go.

Read `machine` (its logic, without sockets), then `process` and `client` (the two ends), then `log` (why the loss of a
server loses no update).
"""

from paceline_server.parameters.client import Pulled, Pushed, ServerClient
from paceline_server.parameters.log import OwnViews, StoreViews, View, Views
from paceline_server.parameters.machine import Ticket
from paceline_server.parameters.process import ParameterServer
from paceline_server.parameters.settings import GroupSettings, ServerSettings, TensorSpec

__all__ = [
    "GroupSettings",
    "OwnViews",
    "ParameterServer",
    "Pulled",
    "Pushed",
    "ServerClient",
    "ServerSettings",
    "StoreViews",
    "TensorSpec",
    "Ticket",
    "View",
    "Views",
]
