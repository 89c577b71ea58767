"""Minimal Excel files, written by hand: one XML file for each sheet."""

import zipfile
from datetime import datetime, timedelta
from xml.sax.saxutils import escape

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml"


def write_xlsx(path, sheets):
    """Write rows of numbers, texts, dates and None, for each name of a sheet."""
    numbers = range(1, len(sheets) + 1)
    parts = "".join(
        f'<Override PartName="/xl/sheet{k}.xml" ContentType="{_TYPE}.worksheet+xml"/>'
        for k in numbers
    )
    names = "".join(
        f'<sheet name="{escape(name)}" sheetId="{k}" r:id="r{k}"/>'
        for k, name in zip(numbers, sheets, strict=True)
    )
    links = "".join(
        f'<Relationship Id="r{k}" Type="{_OFFICE}/worksheet" Target="sheet{k}.xml"/>'
        for k in numbers
    )
    relationships = f'<Relationships xmlns="{_PACKAGE}/relationships">'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "[Content_Types].xml",
            f'<Types xmlns="{_PACKAGE}/content-types">'
            '<Default Extension="rels" '
            'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPE}.sheet.main+xml"/>'
            f'<Override PartName="/xl/styles.xml" ContentType="{_TYPE}.styles+xml"/>'
            f"{parts}</Types>",
        )
        archive.writestr(
            "_rels/.rels",
            f'{relationships}<Relationship Id="r" Type="{_OFFICE}/officeDocument" '
            'Target="xl/workbook.xml"/></Relationships>',
        )
        archive.writestr(
            "xl/workbook.xml",
            f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><sheets>{names}</sheets></workbook>',
        )
        links += f'<Relationship Id="s" Type="{_OFFICE}/styles" Target="styles.xml"/>'
        archive.writestr("xl/_rels/workbook.xml.rels", f"{relationships}{links}</Relationships>")
        archive.writestr(
            "xl/styles.xml",
            f'<styleSheet xmlns="{_MAIN}"><cellXfs><xf numFmtId="0"/><xf numFmtId="22"/></cellXfs>'
            "</styleSheet>",
        )
        for k, rows in zip(numbers, sheets.values(), strict=True):
            lines = "".join(f"<row>{''.join(map(_cell, row))}</row>" for row in rows)
            text = f'<worksheet xmlns="{_MAIN}"><sheetData>{lines}</sheetData></worksheet>'
            archive.writestr(f"xl/sheet{k}.xml", text)


def _cell(value):
    if value is None:
        return "<c/>"
    if isinstance(value, str):
        return f'<c t="inlineStr"><is><t>{escape(value)}</t></is></c>'
    if isinstance(value, bool):
        return f'<c t="b"><v>{int(value)}</v></c>'
    if isinstance(value, datetime):
        return f'<c s="1"><v>{(value - datetime(1899, 12, 30)) / timedelta(days=1)!r}</v></c>'
    return f"<c><v>{value!r}</v></c>"
