"""What a step is and what the rewrite changed, as data and as text."""
