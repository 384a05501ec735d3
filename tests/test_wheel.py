"""The built wheel: what a user installs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module, the typing marker, the license; no tests, no examples."""
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_ckpt").rglob("*.py")}
    assert modules <= names
    assert "lightning_ckpt/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"lightning_ckpt", "lightning_ckpt-0.1.0.dist-info"}


def test_the_wheel_runs_where_the_source_is_not(wheel: Path, tmp_path: Path) -> None:
    """Unpacked into an empty folder, the package is found there and its command works."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, '.'); import lightning_ckpt; from lightning_ckpt.cli import main;"
        "print(lightning_ckpt.__file__); sys.exit(main(['explain']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert "47.1% of plain" in done.stdout


def test_the_wheel_declares_the_command(wheel: Path) -> None:
    """Installing it puts `lightning-ckpt` on the path."""
    entries = zipfile.ZipFile(wheel).read("lightning_ckpt-0.1.0.dist-info/entry_points.txt").decode()
    assert "lightning-ckpt = lightning_ckpt.cli:main" in entries
