"""The package as others get it: its wheel, its images, and the steps that install it here."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import groupwise

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
each_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
HADOLINT = shutil.which("hadolint") or shutil.which(
    "hadolint", path=str(Path(sys.executable).parent)
)
FIRST_RUN = ("train", "steps=1", "prompts_per_step=2", "group_size=2", "eval.tasks=2",
             "tiny.cold_start_steps=1", "tiny.width=32", "tiny.layers=1")  # fmt: skip


# --- a version and its changes ------------------------------------------------------------------


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    heads = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert heads[0].startswith(groupwise.__version__)


# --- the wheel ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and a source archive of a copy, so that nothing is left in the checkout."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("no build: make setup")
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git: what belongs to the package is not known")
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, env=_without_checkout())
    if "No matching distribution found for setuptools" in done.stdout + done.stderr:
        pytest.skip("no setuptools for an isolated build: no index of packages is reached")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def _without_checkout() -> dict[str, str]:
    return {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
def test_the_wheel_has_all_that_is_no_code(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "groupwise").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert wanted <= inside, wanted - inside
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"constraints.txt", "CHANGELOG.md", "configs/demo.toml"} <= names


@pytest.mark.slow
def test_the_wheel_trains_and_shows_where_there_is_no_checkout(built: Path, tmp_path: Path) -> None:
    """In an environment of its own, which reads the other packages of this one."""
    home = tmp_path / "home"
    venv.create(home, with_pip=True)
    (wheel,) = built.glob("*.whl")
    python = home / "bin" / "python"
    asked = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(asked, check=True, env=_without_checkout())
    place = next(home.glob("lib/python*/site-packages"))
    here = [path for path in sys.path if path.endswith("site-packages")]
    (place / "others.pth").write_text("\n".join(here) + "\n")

    def run(*words: str) -> str:
        """Run the installed command in an empty folder."""
        done = subprocess.run(
            [home / "bin" / "groupwise", *words],
            cwd=tmp_path, capture_output=True, text=True, env=_without_checkout(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert run("--version").split() == ["groupwise", groupwise.__version__]
    assert "pitfalls" in run("explain", "grpo")  # from a file beside the code
    assert run("doctor").splitlines()[-1].startswith("next: groupwise ")
    run(*FIRST_RUN, "--run", "runs/first")
    run("view", "--export", "runs/first", "first.html")
    assert "<svg" in (tmp_path / "first.html").read_text("utf-8")
    told = subprocess.run(
        [python, "-c", "import groupwise; print(groupwise.__file__)"],
        cwd=tmp_path, capture_output=True, text=True, env=_without_checkout(),
    )  # fmt: skip
    assert told.stdout.startswith(str(home)), "the checkout was not what ran"


# --- images: never built here, so at least read --------------------------------------------------


@each_image
def test_images_pass_the_linter(path: Path) -> None:
    if HADOLINT is None:
        pytest.skip("no hadolint: make setup")
    done = subprocess.run([HADOLINT, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@each_image
def test_images_copy_what_is_there_and_is_not_left_out(path: Path) -> None:
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.MULTILINE)
    for name in (name for line in copied for name in line.split()):
        assert (ROOT / name).exists(), name
        assert any(fnmatch.fnmatch(name, pattern) for pattern in kept), name
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for listed in re.findall(r"'\.\[([a-z,]+)\]'", path.read_text()):
        assert set(listed.split(",")) <= set(extras)


@each_image
def test_images_do_not_run_as_root(path: Path) -> None:
    users = re.findall(r"^USER (\S+)$", path.read_text(), re.MULTILINE)
    assert users and users[-1].split(":")[0] not in ("root", "0")


# --- the steps of the Makefile -------------------------------------------------------------------


def planned(target: str, made: tuple[str, ...], folder: Path) -> str:
    """Return what make would do for a target in a copy where some stamps are made."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
        os.utime(folder / name, (1, 1))
    for age, stamp in enumerate(made):
        (folder / stamp).parent.mkdir(exist_ok=True)
        (folder / stamp).touch()
        os.utime(folder / stamp, (10 + age, 10 + age))
    done = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_demo_installs_no_tools_of_development(tmp_path: Path) -> None:
    fresh = planned("demo", (), tmp_path)
    assert "'.[view]'" in fresh and "dev" not in fresh.replace("development", "")
    tested = planned("test", (), tmp_path)
    assert tested.index("'.[view]'") < tested.index("'.[dev]'")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_tests_behind_a_demo_install_what_is_missing(tmp_path: Path) -> None:
    """In the same environment, which has less than they need; and once, not every time."""
    behind = planned("test", (".venv/.runtime",), tmp_path)
    assert "'.[dev]'" in behind and "'.[view]'" not in behind
    again = planned("test", (".venv/.runtime", ".venv/.ready"), tmp_path)
    assert "pip" not in again
    assert "pip" not in planned("demo", (".venv/.runtime", ".venv/.ready"), tmp_path)
