"""`python -m flashattn tune` on the simulated GPU, whose clock turns with the work it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import flashattn as fa
import numpy as np
import pytest
from flashattn._cli import main, tune, tune_candidate
from flashattn._cli.metal_core import core

pytestmark = pytest.mark.skipif(
    not any(info.name == "metal" and info.available and not info.default for info in fa.backends()),
    reason="needs the simulated Metal device",
)

SLOT = "forward float32 64"
QUICK = ["--seqlen", "128", "--heads", "1", "--rounds", "1", "--only", SLOT]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for new processes; this one has opened its own."""
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FLASHATTN_METAL_KERNELS", raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def shipped() -> Any:
    yield
    core.metal_use_tuning(None)


def in_new_process(code: str, folder: Path, **environment: str) -> str:
    """What the code prints in a process whose cache folder is `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FLASHATTN_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SOURCE = "from flashattn import _core; print(_core.metal_tuning_source())"
SAVE = """
from flashattn import _core
slot, _, names = _core.metal_tuning_slots()[0]
table = f"flashattn tuning 1\\n{slot} {names[-1]}\\nend\\n"
"""


def fake_candidates(monkeypatch: pytest.MonkeyPatch, answers: dict[str, dict[str, Any]]) -> None:
    """Candidates answer as told, without a process; those not named take a second."""

    def run_child(module: str, request: dict[str, Any], **_: Any) -> dict[str, Any]:
        return answers.get(request["choice"], {"seconds": [1.0]})

    monkeypatch.setattr(tune, "run_child", run_child)


def test_it_picks_the_cheapest_and_later_processes_use_it(folder: Path) -> None:
    code = f"from flashattn._cli import main; main(['tune', '--json', *{QUICK!r}])"
    result = json.loads(in_new_process(code, folder))
    (slot,) = result["slots"]
    assert result["right"]
    assert not slot["broken"]
    assert len(slot["candidates"]) >= 4
    times = slot["candidates"]
    cheapest = min(times, key=times.__getitem__)
    gain = times[slot["shipped"]] / times[cheapest]
    assert slot["chosen"] == (cheapest if gain > 1 / 0.98 else slot["shipped"])
    assert times["staged"] > times[slot["chosen"]]
    assert Path(result["stored"]).parent == folder
    assert "measured on this device" in in_new_process(SOURCE, folder)
    assert "shipped" in in_new_process(SOURCE, folder, FLASHATTN_TUNING="shipped")
    text = in_new_process("import flashattn as fa; fa.show_config()", folder)
    assert "measured on this device" in text


def test_a_wrong_variable_is_told_and_calls_raise(folder: Path) -> None:
    code = """
    import numpy as np, flashattn as fa
    fa.show_config()
    x = np.ones((1, 8, 1, 16), np.float32)
    try:
        fa.attention(x, x, x)
    except ValueError as error:
        print("raised:", error)
    """
    text = in_new_process(textwrap.dedent(code), folder, FLASHATTN_TUNING="mine")
    told = 'FLASHATTN_TUNING (mine) must be "shipped" or unset'
    assert f"sizes {told}" in text
    assert f"raised: {told}" in text


def slot_names() -> tuple[str, list[str]]:
    slot, _, names = next(row for row in core.metal_tuning_slots() if SLOT in row[0])
    return slot, names


@pytest.mark.parametrize(
    "answer", [{"error": "wrong: out is off by 1"}, {"error": "it did not end within 60 seconds"}]
)
def test_a_broken_candidate_is_left_out(
    answer: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, names = slot_names()
    fake_candidates(monkeypatch, {names[1]: answer, names[2]: {"seconds": [0.5, 0.1, 0.5]}})
    assert main(["tune", "--json", "--dry-run", *QUICK]) == 1
    result = json.loads(capsys.readouterr().out)
    (slot,) = result["slots"]
    assert slot["broken"] == {names[1]: answer["error"]}
    assert slot["chosen"] == names[2]
    assert result["stored"] is None
    fake_candidates(monkeypatch, dict.fromkeys(names, answer))
    assert main(["tune", "--dry-run", *QUICK]) == 1
    assert f"left out: {names[0]}: {answer['error']}" in capsys.readouterr().out


def test_small_gains_change_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, names = slot_names()
    fake_candidates(monkeypatch, {names[1]: {"seconds": [0.99]}})
    assert main(["tune", "--json", "--dry-run", *QUICK]) == 0
    assert json.loads(capsys.readouterr().out)["slots"][0]["chosen"] == names[0]


def test_time_that_is_up_leaves_a_slot_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_candidates(monkeypatch, {})
    assert main(["tune", "--dry-run", "--seconds", "0", *QUICK]) == 1
    assert "not measured: the time was up" in capsys.readouterr().out


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fa.attention_forward

    def wrong(*arrays: Any, **options: Any) -> Any:
        out, lse = right(*arrays, **options)
        return out + np.float32(1e-2), lse

    slot, names = slot_names()
    request = {"slot": slot, "choice": names[0], "rounds": 1, "shape": [1, 64, 1]}
    assert "seconds" in tune_candidate.work(request)
    monkeypatch.setattr(fa, "attention_forward", wrong)
    assert tune_candidate.work(request)["error"].startswith("wrong: out is off by")


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="no tuning table"):
        core.metal_use_tuning("flashattn tuning 1\nforward float32 64 any best\nend\n")


@pytest.mark.parametrize("damage", ["", "flashattn tuning 1\n", "\0\xff" * 100, "writable"])
def test_a_damaged_or_foreign_file_is_as_good_as_none(damage: str, folder: Path) -> None:
    path = Path(in_new_process(SAVE + "print(_core.metal_save_tuning(table))", folder))
    assert "measured" in in_new_process(SOURCE, folder)
    if damage == "writable":
        path.chmod(0o666)
    else:
        path.write_text(damage, encoding="latin-1")
    assert "shipped" in in_new_process(SOURCE, folder)


def test_a_full_disk_is_said_and_leaves_the_old_table(folder: Path) -> None:
    path = Path(in_new_process(SAVE + "print(_core.metal_save_tuning(table))", folder))
    before = path.read_text()
    full = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
try:
    _core.metal_save_tuning(table)
except RuntimeError as error:
    print(error)
"""
    assert "cannot be written" in in_new_process(SAVE + full, folder)
    assert path.read_text() == before
    assert [p for p in folder.iterdir() if p.name.startswith("tuning")] == [path]


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    code = SAVE + "_core.metal_save_tuning(table)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FLASHATTN_CACHE_DIR": str(blocked / "below")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RuntimeError: tune:" in done.stderr


def test_two_processes_at_once_leave_one_whole_table(folder: Path) -> None:
    many = SAVE + "for _ in range(200): path = _core.metal_save_tuning(table)\nprint(path)"
    paths: list[str] = []
    writers = [
        threading.Thread(target=lambda: paths.append(in_new_process(many, folder)))
        for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(set(paths)) == 1
    assert "measured" in in_new_process(SOURCE, folder)
    assert [p for p in folder.iterdir() if p.name.startswith("tuning")] == [Path(paths[0])]


def test_results_do_not_depend_on_the_choice() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 70, 2, 64), np.float32) for _ in range(3))
    expected, _ = fa.attention_forward(q, k, v, causal=True, backend="cpu")
    slot, names = slot_names()
    for name in names:
        core.metal_use_tuning(f"flashattn tuning 1\n{slot} {name}\nend\n")
        out, _ = fa.attention_forward(q, k, v, causal=True, backend="metal")
        np.testing.assert_allclose(out, expected, atol=2e-6)
