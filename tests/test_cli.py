"""`python -m flashattn`: each command, its JSON and exit status; `check` can say wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashattn as fa
import numpy as np
import pytest
from flashattn import _core
from flashattn._cli import bench, check, demo, main, numerics, reference
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
    assert result["memory"]["naive"]["extra_bytes"] > 0
    assert "extra_bytes" in result["memory"]["flashattn"]
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


def test_bench() -> None:
    result = run_json(
        "bench", "--shape", "1,64,2,32", "--rounds", "1", "--seconds", "0.01", "--threads", "1"
    )
    assert result["sides"] == ["flashattn", "torch"]
    kinds = [(cell["causal"], cell["backward"]) for cell in result["cells"]]
    assert kinds == [(False, False), (False, True), (True, False), (True, True)]
    for cell in result["cells"]:
        ours, theirs = (cell["gflops"][side] for side in result["sides"])
        assert cell["ratio"] == pytest.approx(ours / theirs)


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
    result = check.run(None)  # type: ignore[arg-type]
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
