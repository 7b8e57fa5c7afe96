"""Who may do what, from where, how often, and with which files."""
