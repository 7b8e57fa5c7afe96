"""Graph datasets: on-disk format, import, generators."""
