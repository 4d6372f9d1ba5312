"""How a run is: its checkpoints, its saves, and the rows of its newest checkpoint."""
