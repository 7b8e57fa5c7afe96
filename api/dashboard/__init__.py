"""Pages for people, which call the same functions of the service as the routes."""
