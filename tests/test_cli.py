"""`python -m flashattn`: each command, its JSON and exit status; `check` can say wrong."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashattn as fa
import numpy as np
import pytest
from flashattn import _core
from flashattn._cli import _peers, bench, check, demo, main, numerics, reference
from flashattn._cli.child import run_child


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashattn", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=cwd,
    )


def run_json(*arguments: str, cwd: Path | None = None) -> dict[str, Any]:
    finished = run(*arguments, "--json", cwd=cwd)
    assert finished.returncode == 0, finished.stderr
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def test_info() -> None:
    facts = run_json("info")
    assert facts["versions"]["flashattn"] == fa.__version__
    assert {"python", "platform", "machine", "compiler", "threads", "environment"} <= set(facts)
    assert facts["cpu"]["isa"] == facts["cpu"]["isas"][0]
    assert [backend["name"] for backend in facts["backends"]][-1] == "cpu"
    text = run("info").stdout
    assert "versions" in text
    assert facts["cpu"]["isa"] in text


def test_usage_errors() -> None:
    assert run().returncode == 2
    assert run("dance").returncode == 2
    assert "invalid batch,seqlen,heads,head_dim value" in run("bench", "--shape", "1,2,3").stderr


SMALL = ("--seqlen", "160", "--heads", "2", "--head-dim", "32")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_demo(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("ml_dtypes")
    result = run_json("demo", *SMALL, "--dtype", dtype, "--no-picture", cwd=tmp_path)
    assert result["right"] is True
    assert result["shape"] == [1, 160, 2, 32]
    assert set(result["errors"]) == {"out", "lse", "dq", "dk", "dv"}
    for error in result["errors"].values():
        assert 0 < error["max"] <= error["allowed"]
    assert all(number > 0 for number in result["gflops"].values())
    # So small a problem may fit into memory that the imports have left; the next test but one asks
    # for numbers.
    assert set(result["memory"]) == {"flashattn", "naive"}
    assert all("extra_bytes" in way for way in result["memory"].values())
    assert not list(tmp_path.iterdir())


def test_demo_in_words_with_a_picture(tmp_path: Path) -> None:
    finished = run("demo", *SMALL, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    for word in ("problem", "forward", "backward", "GFLOP/s", "right", "O(T^2)"):
        assert word in finished.stdout
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert not list(tmp_path.iterdir())
    else:
        assert (tmp_path / "flashattn-demo.png").read_bytes().startswith(b"\x89PNG")


def test_memory_is_measured_in_the_dtype_asked_for() -> None:
    pytest.importorskip("ml_dtypes")
    shape = (1, 2048, 4, 64)
    taken = {}
    for dtype in ("float32", "bfloat16"):
        request = {"shape": shape, "dtype": dtype, "causal": True, "passes": "forward"}
        taken[dtype] = run_child("flashattn._cli.memory", {**request, "way": "naive"})
    # The plain way turns bfloat16 inputs into float32 ones first.
    extra = taken["bfloat16"]["extra_bytes"] - taken["float32"]["extra_bytes"]
    assert extra > 2 * 2048 * 4 * 64 * 4


def test_demo_measures_memory_in_its_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def child(module: str, request: dict[str, Any]) -> dict[str, Any]:
        asked.append((module, request["dtype"]))
        return {"extra_bytes": 1}

    monkeypatch.setattr(demo, "run_child", child)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *SMALL, "--dtype", "float16", "--no-picture", "--json"]) == 0
    assert asked == [("flashattn._cli.memory", "float16")] * 2
    assert json.loads(capsys.readouterr().out)["dtype"] == "float16"


def test_bench_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "numpy_dtype", lambda name: None)
    with pytest.raises(SystemExit, match="bench: bfloat16 needs the package ml_dtypes"):
        main(["bench", "--dtype", "bfloat16"])


TINY = ("--shape", "1,64,2,32", "--rounds", "1", "--seconds", "0.01", "--threads", "1")


def installed_peers() -> list[str]:
    return [n for n, side in _peers.SIDES.items() if importlib.util.find_spec(side.module)]


def test_bench(tmp_path: Path) -> None:
    """Against everything that is installed, with a picture where matplotlib is."""
    drawn = importlib.util.find_spec("matplotlib") is not None
    picture = tmp_path / "bars"
    result = run_json("bench", *TINY, *(["--plot", str(picture)] if drawn else []))
    assert result["sides"] == ["flashattn", *installed_peers()]
    assert not result["failed"]
    assert set(result["versions"]) == set(result["sides"])
    kinds = [(cell["causal"], cell["backward"]) for cell in result["cells"]]
    assert kinds == [(False, False), (False, True), (True, False), (True, True)]
    for cell in result["cells"]:
        assert set(cell["gflops"]) == set(result["sides"])
        ours = cell["gflops"]["flashattn"]
        for side, ratio in cell["ratios"].items():
            assert ratio == pytest.approx(ours / cell["gflops"][side])
        measured = {s for s, speed in cell["gflops"].items() if speed is not None}
        assert set(cell["ratios"]) == measured - {"flashattn"}
    if drawn:
        assert result["plot"] == f"{picture}.svg"
        assert "<svg" in picture.with_suffix(".svg").read_text()


def test_bench_quick_suite_in_words(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Gaps, a side that fails, and the exit status, without the work."""
    monkeypatch.setattr(bench, "_peers", lambda named: ["torch", "onnxruntime", "mlx"])
    asked = []

    def child(module: str, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        if request["side"] == failing:
            return {"error": "it is gone"}
        one: dict[str, Any] = {"wall": 0.5, "cpu": 0.5}
        cells = request["cells"]
        gap = {"skipped": "no such kernel"}
        onnx = request["side"] == "onnxruntime"
        times = [gap if onnx and cell["backward"] else one for cell in cells]
        return {"version": "1", "times": times}

    monkeypatch.setattr(bench, "run_child", child)
    failing = "mlx"
    assert main(["bench", "--suite", "quick"]) == 0
    text = capsys.readouterr().out
    assert "mlx did not finish: it is gone" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("forward", "backward"))]
    assert len(rows) == 8
    assert all(row[-1] == ("-" if row[0] == "backward" else "1.00") for row in rows)
    assert all(row[-2] == "1.00" for row in rows)
    assert [request["side"] for request in asked] == ["flashattn", "torch", "onnxruntime", "mlx"]
    failing = "flashattn"
    assert main(["bench", "--suite", "quick"]) == 1
    assert "flashattn did not finish" in capsys.readouterr().out


def test_bench_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="mlx is not installed"):
        main(["bench", *TINY, "--against", "mlx"])
    with pytest.raises(SystemExit, match="--plot needs the package matplotlib"):
        main(["bench", *TINY, "--plot", "bars.svg"])


@pytest.mark.parametrize("name", sorted(_peers.SIDES))
def test_every_side_computes_attention(name: str) -> None:
    """What is timed on a side is what is timed here."""
    side = _peers.SIDES[name]
    pytest.importorskip(side.module)
    if name == "onnxruntime":
        pytest.importorskip("onnx", reason="onnx makes its model")
    cell = {"shape": (1, 24, 2, 16), "dtype": "float32", "causal": True, "backward": False}
    code = """
import json, sys, numpy as np, flashattn as fa
from flashattn._cli import _peers
from flashattn._cli.problems import random_arrays
name, cell = json.loads(sys.argv[1])
side = _peers.SIDES[name]
side.prepare(1)
q, k, v, dout = random_arrays([tuple(cell["shape"])] * 4, "float32")
out, lse = fa.attention_forward(q, k, v, causal=True)
expected = {False: [out], True: fa.attention_backward(dout, q, k, v, out, lse, causal=True)[:3]}
for backward in (False, True):
    cell["backward"] = backward
    try:
        call = side.call(cell)
    except NotImplementedError:
        assert name == "onnxruntime" and backward
        continue
    got = side.numpy(call(), cell)
    assert len(got) == (3 if backward else 1)
    for one, other in zip(got, expected[backward], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
"""
    command = [sys.executable, "-c", code, json.dumps([name, cell])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """check's own machinery, without the processes and with few problems."""
    few = {name: numerics._CASES[name] for name in ("offset", "dim 1")}
    monkeypatch.setattr(numerics, "_CASES", few)
    monkeypatch.setattr(check, "run_child", lambda module, request, _: numerics.work(request))
    isas = _core.supported_isas()
    monkeypatch.setattr(_core, "supported_isas", lambda: isas[:2])


@pytest.fixture(autouse=True)
def same_isa() -> Any:
    before = _core.active_isa()
    yield
    _core.set_isa(before)


@pytest.mark.usefixtures("two_cases")
def test_check_says_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["right"] is True
    on_cpu = [way["isa"] for way in result["ways"] if way["backend"] == "cpu"]
    assert on_cpu == _core.supported_isas()
    for way in result["ways"]:
        assert way["checked"] == 2 * 3 * 5
        assert 0 < way["worst_share"] <= 1
    assert main(["check"]) == 0
    assert "right" in capsys.readouterr().out


@pytest.mark.usefixtures("two_cases")
@pytest.mark.parametrize("wrong", ["value", "nan", "dead"])
def test_check_says_wrong(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = fa.attention_forward

    def broken(*arguments: Any, **options: Any) -> Any:
        out, lse = forward(*arguments, **options)
        if wrong == "dead":
            raise RuntimeError("the device is gone")
        element = (0,) * out.ndim
        out[element] = np.nan if wrong == "nan" else out[element] + np.asarray(0.05, out.dtype)
        return out, lse

    monkeypatch.setattr(fa, "attention_forward", broken)
    if wrong == "dead":
        with pytest.raises(RuntimeError):
            main(["check"])
        return
    assert main(["check"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_child_that_dies_is_an_error_and_not_an_end() -> None:
    answer = run_child("flashattn._cli.numerics", {"backend": "cpu", "isa": "abacus"})
    assert "abacus" in answer["error"]


def test_a_crash_is_reported_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "run_child", lambda *_: {"error": "exit status -4"})
    result = check.run(argparse.Namespace(candidates=None))
    assert result["right"] is False
    assert "did not finish: exit status -4" in "\n".join(check.lines(result))


def test_the_reference_against_torch() -> None:
    """check's float64 truth is itself checked, values and gradients."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 11, h, 8)) for h in (4, 2, 2, 4)]
    truth = reference.attention(tuple(arrays), {"causal": True})
    q, k, v = (torch.from_numpy(x).transpose(1, 2).requires_grad_() for x in arrays[:3])
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(torch.from_numpy(arrays[3]).transpose(1, 2))
    for mine, theirs in zip(
        (truth.out, truth.dq, truth.dk, truth.dv), (out, q.grad, k.grad, v.grad), strict=True
    ):
        np.testing.assert_allclose(mine, theirs.detach().transpose(1, 2).numpy(), atol=1e-12)
