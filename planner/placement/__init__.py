"""Where rows live: published policies and one evaluator."""
