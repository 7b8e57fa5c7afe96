"""Candidates, formulation, bound."""
