"""Cost model: predicted time, memory and money of a plan."""
