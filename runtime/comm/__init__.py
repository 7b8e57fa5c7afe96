"""Thin typed collectives that meter their stage."""
