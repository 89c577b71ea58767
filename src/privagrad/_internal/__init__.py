"""Shared internals: checks of input, compiled kernels, progress bars, files."""
