"""Placement policies: which rows each device holds."""
