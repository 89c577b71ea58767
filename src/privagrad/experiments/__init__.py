"""Problems, methods compared on them, and the paper's experiments.

Every experiment reads its rows without privacy, to tune and to measure: it compares methods and
releases no model.
"""

DELTA = 1e-5
"""Of all experiments: the paper does not state its own."""
