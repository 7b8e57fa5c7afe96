"""Hold the dimensions of the search: each proposes candidates, prices them, or says why none."""
