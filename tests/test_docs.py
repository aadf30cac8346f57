"""What the documents say: their Python runs, their links lead somewhere, and the version is one."""

import importlib.util
import re
import sys
from pathlib import Path

import flashattn
import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("source", PYTHON_BLOCKS, ids=lambda source: source.split(None, 2)[1])
def test_the_readme_runs(source: str) -> None:
    for name in ("torch", "transformers", "jax", "mlx"):
        if re.search(rf"^(?:import|from) {name}\b", source, re.MULTILINE):
            pytest.importorskip(name, reason=f"{name} is not installed")
    exec(compile(source, "README.md", "exec"), {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_a_file(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


def test_the_version_is_the_one_in_cmakelists() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(r"project\(flashattn VERSION ([0-9.]+)", text)
    assert found is not None
    assert flashattn.__version__ == found[1]


def test_every_claim_of_verify_is_in_its_document() -> None:
    """docs/verify.py measures them; here only that it knows what the documents say."""
    spec = importlib.util.spec_from_file_location("verify", ROOT / "docs" / "verify.py")
    assert spec is not None
    assert spec.loader is not None
    verify = sys.modules["verify"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(verify)
    for claim in verify.CLAIMS:
        assert claim.claimed() > 0
        assert claim.holds(claim.claimed())
        assert not claim.holds(2 * claim.claimed())
    exact = [claim for claim in verify.CLAIMS if claim.kind == "work"]
    assert all(claim.measure() == claim.claimed() for claim in exact)
