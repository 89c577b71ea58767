"""Files on disk as rows of numbers: readers, schema, encoding, model files."""
