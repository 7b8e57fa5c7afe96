"""Kinds of choices: one module each, that proposes candidates, prices them, and says why none."""
