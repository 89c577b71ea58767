"""Digits (MNIST) by a private linear model on fixed features, with noise of the features' shape.

`data` reads the images, `scattering` are the features, `strokes` the public pictures whose moments
give the `basis`, `training` makes one run, `runs` makes all of them, and `tables` writes the
results.
"""
