"""Images of digits and their labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from privagrad._internal.validate import Integers
from privagrad.experiments.images.scattering import SIDE, Images

CLASSES = 10
_HELD_OUT = 6
"""One in so many training rows, the last ones, is held out for tuning."""
_QUICK = 4000
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Digits:
    """Private images with labels, and the images and labels that measure a model."""

    images: Images
    labels: Integers
    test_images: Images
    test_labels: Integers

    def beginning(self) -> Digits:
        """The first rows of both parts, for a quick run."""
        some = slice(_QUICK)
        return Digits(
            self.images[some], self.labels[some], self.test_images[some], self.test_labels[some]
        )

    def held_out(self) -> Digits:
        """The last sixth of the training rows in place of the test rows, which tuning must not see.

        Of MNIST that are 10,000 of 60,000.
        """
        first = len(self.images) - len(self.images) // _HELD_OUT
        return Digits(
            self.images[:first], self.labels[:first], self.images[first:], self.labels[first:]
        )


def read_digits(folder: Path) -> Digits:
    """Read mnist.npz: images x_train and x_test, bytes, and labels y_train and y_test."""
    path = folder / "mnist.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected mnist.npz with the arrays {', '.join(_ARRAYS)}; found nothing at {path}."
        )
    with np.load(path) as file:
        missing = [name for name in _ARRAYS if name not in file.files]
        if missing:
            raise ValueError(f"Expected the array {missing[0]} in {path}, found {file.files}.")
        images, labels, test_images, test_labels = (file[name] for name in _ARRAYS)
    _check(images, labels)
    _check(test_images, test_labels)
    return Digits(images, labels.astype(np.int64), test_images, test_labels.astype(np.int64))


def _check(images: Images, labels: Integers) -> None:
    if images.dtype != np.uint8 or images.shape != (len(labels), SIDE, SIDE):
        raise ValueError(
            f"Expected images of bytes of shape ({len(labels)}, {SIDE}, {SIDE}), one for each "
            f"label; found {images.dtype} of shape {images.shape}."
        )
    if not np.isin(labels, range(CLASSES)).all():
        raise ValueError("Expected labels from 0 to 9, found others.")
