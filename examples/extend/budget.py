"""A section of the job: `budget: {euros: 20}`."""

from paceline.job.spec import JobSection, Spec


class Budget(Spec):
    """What a training may cost."""

    euros: float


SECTION = JobSection(Budget)
