"""Generalized linear models: losses, rows, fused kernels, bounded gradients, minimisers."""
