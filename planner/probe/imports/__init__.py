"""What other tools measured of a machine, read from their files."""
