"""Price ranks by their processor and by how they work together."""
