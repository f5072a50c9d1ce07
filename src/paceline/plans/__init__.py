"""How a job is run on a cluster: every parallel choice, explicit, in one line of text."""

from paceline.planner.auto import auto_plan
from paceline.planner.check.nearest import nearest_plan
from paceline.planner.legal_plans import legal_plans
from paceline.plans.plan import Plan, cores_of

__all__ = ["Plan", "auto_plan", "cores_of", "legal_plans", "nearest_plan"]
