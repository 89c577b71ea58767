"""Why a training is refused."""

from __future__ import annotations

BROKEN = (RuntimeError, IndexError, ValueError, AssertionError, TypeError, KeyError)
"""What computing something again for other examples may end in."""

ADVICE = (
    "Compute the loss of each example by itself and take the mean or the sum; or hand over the "
    "criterion, which is then evaluated example by example: see PerExampleLoss."
)
"""What to do about a loss that is refused."""


class UnverifiedError(RuntimeError):
    """What the engine computes for an example cannot be shown to be that example's gradient."""


class UntriedError(UnverifiedError):
    """A module that cannot be run on a few examples alone."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            "Expected a module that runs on a few examples of the batch, and on one alone, so that "
            f"it can be verified; found {type(error).__name__}: {error}. Let the module take any "
            "number of examples in its inputs' first dimension (or set batch_first). If you vouch "
            "yourself that it treats every example by itself, pass verify=False to make_private."
        )
        self.__cause__ = error


def padding_matters(what: str) -> UnverifiedError:
    return UnverifiedError(
        f"Expected {what} of an example to be the same at any length that the batch is padded to, "
        "found that padding changes it, or that it cannot be computed without: the longest example "
        "of a batch would change the gradients of all others. Mask what is padded, divide by each "
        "example's own length, or pad all rows to one public length."
    )
