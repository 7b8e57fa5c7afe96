"""Migrations of the tables, run when the service starts."""
