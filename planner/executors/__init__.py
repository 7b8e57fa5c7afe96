"""A plan as a job of a cluster's scheduler: files for Slurm and Kubernetes."""
