"""Pages for people: the same acts as the REST routes, through the same functions of the service."""
