"""The HTML report: one file with words, tables and charts that needs nothing else to be read."""

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
