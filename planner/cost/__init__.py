"""Pure arithmetic: seconds and bytes of each stage."""
