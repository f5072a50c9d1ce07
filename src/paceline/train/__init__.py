"""The run: the engine that takes steps, the loop around it, its meter, its checkpoints and its record."""
