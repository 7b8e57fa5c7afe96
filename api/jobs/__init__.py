"""Long work: lanes that claim jobs, and one process group per job."""
