"""Gradients of single examples without a copy of the model for each: layers, tape, gradients."""
