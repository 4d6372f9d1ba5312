"""The checkpoint manager: counts steps, saves when a save is due, and resumes a run."""
