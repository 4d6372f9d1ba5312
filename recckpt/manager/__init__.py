"""The checkpoint manager: counts steps, saves when it is time, and resumes."""
