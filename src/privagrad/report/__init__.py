"""HTML reports: one file with text, tables and charts, which loads nothing else."""

from privagrad.report.charts import Series, bar_chart, gauge, line_chart
from privagrad.report.page import (
    Banner,
    Block,
    Card,
    Chart,
    Figure,
    Table,
    Text,
    render,
    write_page,
)

__all__ = [
    "Banner",
    "Block",
    "Card",
    "Chart",
    "Figure",
    "Series",
    "Table",
    "Text",
    "bar_chart",
    "gauge",
    "line_chart",
    "render",
    "write_page",
]
