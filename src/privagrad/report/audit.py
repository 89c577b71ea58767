"""The report of an audit: claimed and measured epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from privagrad.audit import Audit
from privagrad.report.charts import Series, line_chart
from privagrad.report.page import Banner, Block, Figure, Table, Text, write_page

_MEANING = (
    "An attack that reaches a part of the claim does not prove the claim: a better attack may "
    "reach more. An attack that exceeds it proves that the claim is wrong.",
    "The attacker knows all rows but one, and the rows are chosen to make the attack as strong as "
    "possible. Rows of real tables are attacked less easily.",
)


def write_audit_report(path: Path, audits: Sequence[Audit]) -> None:
    """Write one HTML file about what attacks have shown."""
    violated = [one for one in audits if one.violated]
    banner = Banner("No attack exceeds its claim.", "good")
    if violated:
        banner = Banner(f"{len(violated)} of {len(audits)} claims are refuted.", "warning")
    blocks: list[Block] = [banner, _figure(audits), _table(audits)]
    blocks.append(Text("What this means", _MEANING))
    subtitle = f"delta {audits[0].delta:g}, confidence {audits[0].confidence:g}"
    write_page(path, "Audit of privagrad", subtitle, blocks)


def _figure(audits: Sequence[Audit]) -> Figure:
    claims = sorted({one.claimed for one in audits})
    lines = [Series("claimed", claims, claims)]
    for attack in dict.fromkeys(one.attack for one in audits):
        some = sorted((one.claimed, one.measured) for one in audits if one.attack == attack)
        lines.append(Series(attack, [at for at, _ in some], [shown for _, shown in some]))
    chart = line_chart(lines, "claimed epsilon", "measured epsilon, a lower bound")
    return Figure("Claimed and measured", chart, "Points above the line of claims refute them.")


def _table(audits: Sequence[Audit]) -> Table:
    rows = [
        (one.attack, one.claimed, one.measured, f"{one.fraction:.0%}", one.samples,
         "VIOLATED" if one.violated else "consistent")
        for one in audits
    ]  # fmt: skip
    columns = ("attack", "claimed", "measured", "fraction", "scores", "verdict")
    return Table("All attacks", columns, rows)
