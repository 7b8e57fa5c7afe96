"""Long work: lanes of workers, and one process group per job."""
