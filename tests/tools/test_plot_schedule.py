"""The schedule tool draws what it is asked for, and refuses a wrong schedule with its grid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.plot_schedule import main

GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"


def test_timeline_and_picture(tmp_path, capsys):
    picture = tmp_path / "a.svg"
    assert main(["--pp", "2", "--microbatches", "2", "--ops", "--output", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "rank 0: F0.0 F1.0 .    .    B0.0 -    .    B1.0 -" in out
    assert "makespan 9, bubble 33.3%, live microbatch-chunks per rank 2 1" in out
    assert "F0.0 SEND_F0.0>1" in out
    assert picture.read_text().startswith("<svg")


def test_a_file_is_drawn_as_a_trace(tmp_path, capsys):
    trace = tmp_path / "a.json"
    assert main(["--file", str(GOLDEN / "1f1b_pp4_vpp2_m8.txt"), "--output", str(trace)]) == 0
    assert "4 stages x 2 chunks, 8 microbatches" in capsys.readouterr().out
    assert "traceEvents" in trace.read_text()


def test_a_wrong_file_is_refused_with_its_grid(tmp_path, capsys):
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("B0 F0\n")
    assert main(["--file", str(wrong)]) == 2
    assert ">>B0.0<< F0.0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--output", "a.gif"])


def test_it_runs_as_a_program_without_torch():
    code = "import sys; sys.modules['torch'] = None; import runpy; sys.argv = ['plot_schedule', '--pp', '2']; "
    code += "runpy.run_path('tools/plot_schedule.py', run_name='__main__')"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and "bubble 11.1%" in done.stdout, done.stderr
