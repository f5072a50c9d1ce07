"""A chart of a page: an id, the figure, and its content in words.

The words are for those who cannot see it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import plotly.graph_objects as go


@dataclass(frozen=True)
class Chart:
    """One plotly figure of a page; `note` is added to its caption's definitions."""

    name: str
    figure: go.Figure
    label: str
    note: str = ""

    @cached_property
    def height(self) -> int:
        """Pixels, reserved before the chart is drawn so that the page does not jump."""
        return int(self.figure.layout.height)

    @property
    def values(self) -> Any:
        """The figure as plain JSON values (no NaN)."""
        return json.loads(self.figure.to_json())
