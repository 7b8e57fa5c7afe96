"""A plan as one self-contained page: pictures drawn here, numbers from the plan alone."""
