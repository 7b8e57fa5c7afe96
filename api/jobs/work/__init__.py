"""What job processes do, one module per kind: `run(request, job)` returns the outcome's result."""
