"""A parameter server: a process that owns parameters, and clients that come and go.

Read `machine` (what it does, without sockets), then `process` and `client` (the two ends), then `log` (how nothing is
lost with a server).
"""

from paceline.remote.server.client import Pulled, Pushed, ServerClient
from paceline.remote.server.process import ParameterServer
from paceline.remote.server.settings import GroupSettings, ServerSettings, TensorSpec
from paceline.remote.server.tickets import Ticket
from paceline.remote.server.views import OwnViews, StoreViews, View, Views

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
