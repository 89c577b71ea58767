"""What is public about a table, and the plan of a fit that follows from it alone."""

from __future__ import annotations

from dataclasses import dataclass

from privagrad.data.columns import Column, Schema
from privagrad.data.encoding import Encoding, encoding_of
from privagrad.data.readers import undiscovered
from privagrad.data.tables import Table
from privagrad.glm.losses import Loss
from privagrad.linear import Choices, Plan, PublicFacts, plan_fit
from privagrad.queries.categories import discovery

_GUESSED_CATEGORIES = 21
"""Of a column whose categories are not known yet: for the size of batches alone."""


@dataclass(frozen=True)
class PublicTable:
    """All that a plan may depend on, before categories are discovered.

    `undiscovered` names the columns whose categories are to be discovered, the target among them.
    """

    n: int
    encoding: Encoding
    target: Column
    undiscovered: tuple[str, ...]

    @classmethod
    def of_table(cls, table: Table) -> PublicTable:
        """What is public about a table that was read."""
        return cls(table.n, table.encoding, table.target, tuple(table.counts))

    @classmethod
    def of_schema(cls, schema: Schema, n: int) -> PublicTable:
        """What is public about n rows with this schema, which has a target."""
        target = schema.column(str(schema.target))
        return cls(n, encoding_of(schema), target, tuple(undiscovered(schema)))

    def facts(self, loss: Loss) -> PublicFacts:
        """The problem, with a guess at the number of columns that are not known yet."""
        encoding, target = self.encoding, self.target
        unknown = sum(name != target.name for name in self.undiscovered)
        width = len(encoding.names) + _GUESSED_CATEGORIES * unknown
        classes = 0 if loss.regression else len(target.categories)
        outputs, bounded = classes if classes > 2 else 1, encoding.bounds is not None
        return PublicFacts(
            self.n, width, outputs, encoding.sparse, loss.regression, True, bounded,
            target.bounded, loss.name == "logistic", False,
            indicators=encoding.indicators,
        )  # fmt: skip

    def plan(self, loss: Loss, epsilon: float, delta: float, choices: Choices) -> Plan:
        """The fit and the discovery of categories before it."""
        columns = len(self.undiscovered)
        found = [discovery(columns, epsilon, delta)] if columns else []
        return plan_fit(self.facts(loss), epsilon, delta, choices, found, evaluated=True)
