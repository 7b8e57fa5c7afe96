"""Graph -> WorkloadProfile."""
