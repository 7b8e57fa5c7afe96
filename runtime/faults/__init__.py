"""Faults of a job: signs of life, hung ranks, and how an error reaches the user."""
