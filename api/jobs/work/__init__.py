"""What job processes do: functions (request, job) that return the outcome's result."""
