"""What a plan costs: time, memory and money, from the work of the model and the speed of the machines."""
