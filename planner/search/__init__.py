"""Search for the plan: which discrete choices there are, what each costs, and which is best."""
