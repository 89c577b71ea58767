"""A table without its rows: what is public about it, and all that a plan may depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from privagrad.data.columns import Column, Schema
from privagrad.data.encoding import Encoding, encoding_of
from privagrad.data.tables import Table
from privagrad.privacy.events import Unit


@dataclass(frozen=True)
class Outline:
    """What a `Table` says before categories are discovered, as far as it is public.

    `counts` has the columns whose categories are to be discovered, and counts nothing.
    """

    n: int
    encoding: Encoding
    target: Column
    counts: Mapping[str, Counter[str]]
    unit: Unit = "row"

    @classmethod
    def of_table(cls, table: Table) -> Outline:
        """Of a table that was read."""
        return cls(
            table.n, table.encoding, table.target, {name: Counter() for name in table.counts},
            table.unit,
        )  # fmt: skip

    @classmethod
    def of_schema(cls, schema: Schema, n: int) -> Outline:
        """Of n rows, or users, with this schema, which has a target."""
        counts: dict[str, Counter[str]] = {name: Counter() for name in schema.undiscovered}
        unit: Unit = "row" if schema.user is None else "user"
        return cls(n, encoding_of(schema), schema.column(str(schema.target)), counts, unit)
