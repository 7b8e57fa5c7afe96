"""A plan as one self-contained page, with pictures drawn here."""
