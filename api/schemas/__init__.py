"""Bytes in and out of the service: requests are checked here, resources have one shape each."""
