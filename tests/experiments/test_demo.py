import subprocess
import sys

from privagrad.experiments.demo import ENTRIES


def test_the_demo_prints_a_table_and_writes_a_plot(tmp_path):
    command = [sys.executable, "-m", "privagrad.experiments.demo", "--runs", "1"]
    shown = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], check=True, capture_output=True, text=True
    )
    for entry in ENTRIES:
        assert entry.label in shown.stdout
    assert "differential privacy" in shown.stdout
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "out" / "demo.svg").read_text()
    assert "people-report.html" in shown.stdout.replace("\n", "")
    report = (tmp_path / "out" / "people-report.html").read_text()
    assert "Private model of insured" in report
    assert "Budget of people" in report
