"""What the service does, as functions without HTTP; routes and pages call them.

An id that does not exist raises NotFoundError, and what the present state forbids ConflictError;
`gnnplan.api.errors` lists all refusals.
"""
