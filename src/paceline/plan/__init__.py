"""How a job is run on a cluster: every parallel choice, explicit, in one line of text."""

from paceline.plan.auto import auto_plan
from paceline.plan.nearest import nearest_plan
from paceline.plan.plan import Plan, cores_of
from paceline.plan.space import legal_plans

__all__ = ["Plan", "auto_plan", "cores_of", "legal_plans", "nearest_plan"]
