"""What the service does, as functions without HTTP; routes and pages call them."""
