"""HTML reports: one file with text, tables and charts, which loads nothing else."""
