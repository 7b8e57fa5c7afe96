"""Feature tiers: location tables, stores and gathers."""
