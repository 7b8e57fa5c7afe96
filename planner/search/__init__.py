"""The search: which discrete choices there are, what each costs, and which one is the plan."""
