"""Floor 4: scores, generation and reports over finished runs."""
