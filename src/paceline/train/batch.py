from paceline.job.batch import *  # noqa: F403 - removed when all parts of the split are here
from paceline.job.batch import Batch  # noqa: F401
