"""Scripts as PyG's examples have them, and the same under a plan: what changes is counted."""
