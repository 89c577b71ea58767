"""Private questions to all rows: ranges, moments, norms, categories, evaluation."""
