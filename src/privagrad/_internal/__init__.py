"""What every room uses and no user sees: checks of input, compiled kernels, progress, files."""
