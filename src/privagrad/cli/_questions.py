"""Questions in a terminal: each has a default and a line that says why it is asked."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

import typer

from privagrad.cli._output import explain, note

if TYPE_CHECKING:
    from privagrad.data.schema import Column

Answer = TypeVar("Answer")
_SECONDS_OF_A_DAY = 86_400


class Questions:
    """Asks in the terminal; with `silent` every answer is the default."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    def _explain(self, why: str) -> None:
        # Polars registers a handler for Ctrl-C after which the reading of a line just goes on.
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(signal.SIGINT, True)
        explain(why)

    def ask(
        self,
        question: str,
        why: str,
        default: str,
        parse: Callable[[str], Answer],
        given: object = None,
    ) -> Answer:
        """The parsed answer; what was `given` already is not asked. Bad answers are asked again."""
        if given is not None:
            return parse(str(given))
        if self.silent:
            return parse(default)
        self._explain(why)
        while True:
            text: str = typer.prompt(question, default=default, show_default=bool(default))
            try:
                return parse(text)
            except ValueError as error:
                note(str(error), "error", "red")

    def confirm(self, question: str, why: str, default: bool) -> bool:
        """Yes or no."""
        if self.silent:
            return default
        self._explain(why)
        return typer.confirm(question, default=default)


def texts(answer: str) -> tuple[str, ...]:
    """Different texts, separated by commas."""
    found = tuple(part.strip() for part in answer.split(",") if part.strip())
    if len(set(found)) < len(found):
        raise ValueError(f"Expected different values, found one twice in {answer!r}.")
    return found


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """One of some words."""

    def parse(answer: str) -> str:
        if (found := answer.strip()) in names:
            return found
        raise ValueError(f"Expected {' or '.join(names)}, found {answer!r}.")

    return parse


def labels(answer: str) -> tuple[str, ...]:
    """No labels, or at least two."""
    found = texts(answer)
    if len(found) == 1:
        raise ValueError(f"Expected at least two labels, found {found[0]!r} alone.")
    return found


def number(name: str, most: float = math.inf) -> Callable[[str], float]:
    """A positive number, at most `most`."""

    def parse(answer: str) -> float:
        value = _float(answer)
        if not 0 < value <= most or math.isinf(value):
            limit = "" if math.isinf(most) else f" of at most {most:g}"
            raise ValueError(f"Expected a positive {name}{limit}, found {answer!r}.")
        return value

    return parse


def bounds(column: Column) -> Callable[[str], tuple[float, float] | None]:
    """None for no answer, or two numbers (of dates: two dates), the lower one first."""

    def parse(answer: str) -> tuple[float, float] | None:
        parts = texts(answer)
        if not parts:
            return None
        if len(parts) != 2:
            raise ValueError(f"Expected two bounds, low,high, found {answer!r}.")
        read = _days if column.kind == "date" else _float
        low, high = (read(part) for part in parts)
        if not low < high or math.isinf(high - low):
            raise ValueError(f"Expected a lower and a higher bound, found {answer!r}.")
        return low, high

    return parse


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"Expected a number, found {text!r}.") from None


def _days(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        raise ValueError(f"Expected a date like 2024-01-31, found {text!r}.") from None
    return moment.timestamp() / _SECONDS_OF_A_DAY
