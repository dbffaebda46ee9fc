"""The distribution: packages are the folders of rooms, the wheel holds `perdure` and all its data.

Building and installing take seconds and are marked slow; nothing is written into the repository.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import perdure
from perdure.contracts.search import SEARCH_ATTRIBUTES

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Folders of the root that are no rooms.
NOT_ROOMS = {"benchmarks", "build", "dist", "docs", "tests"}
SETUPTOOLS_MIN = int(re.findall(r"setuptools>=(\d+)", PYPROJECT["build-system"]["requires"][0])[0])


def rooms() -> list[Path]:
    """The folders of the root that hold our code."""
    return [
        path
        for path in sorted(ROOT.iterdir())
        if path.is_dir() and not path.name.startswith(".") and path.name not in NOT_ROOMS
    ]


def packages_in_folders() -> list[str]:
    """The root and every folder of a room that has an `__init__.py`, as package names."""
    found = [path.parent for room in rooms() for path in room.rglob("__init__.py")]
    names = [".".join(("perdure", *folder.relative_to(ROOT).parts)) for folder in found]
    return ["perdure", *sorted(names)]


def source_files() -> list[str]:
    """What is in the repository, or would be after `git add`."""
    # The folder may belong to another user than the one who runs the tests.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached"]
    command += ["--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(path for path in set(done.stdout.split("\0")) if (ROOT / path).is_file())


def run(*command: str | Path) -> str:
    """Run a program in the file system's root; its output. A failure shows what it printed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def isolation() -> list[str]:
    """Build with the setuptools that is here if it is new enough, else let pip fetch one."""
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return []
    return ["--no-build-isolation"] if int(version.split(".")[0]) >= SETUPTOOLS_MIN else []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("sources")
    for name in source_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *isolation(), "-w", out, folder)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def contents(wheel: Path) -> list[str]:
    """The names of the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_list_of_packages_equals_the_folders_of_the_rooms() -> None:
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == packages_in_folders()


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for room in rooms() for path in room.rglob("*.py")}

    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_link_for_type_checkers_leads_to_the_root() -> None:
    link = ROOT / ".typing" / "perdure"

    assert link.is_symlink()
    assert link.resolve() == ROOT


def test_the_version_is_said_once() -> None:
    assert perdure.__version__ == PYPROJECT["project"]["version"]


def test_the_image_of_the_worker_copies_every_room() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    dockerfile = compose["services"]["worker"]["build"]["dockerfile_inline"]

    copied = set(re.findall(r"^COPY (\w+) \1$", dockerfile, re.MULTILINE))
    top_packages = {name.split(".")[1] for name in packages_in_folders() if "." in name}
    assert copied == top_packages


def test_the_composed_server_knows_our_search_attributes() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

    command = compose["services"]["temporal"]["command"]
    registered = [word for word in command if word.startswith("--search-attribute=")]
    assert registered == [f"--search-attribute={name}=Keyword" for name in SEARCH_ATTRIBUTES]


def test_every_service_has_a_pinned_image_and_a_health_check() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

    for service in compose["services"].values():
        assert re.search(r":\d", service["image"])
        assert service["healthcheck"]["test"]


@pytest.mark.slow
def test_the_wheel_has_one_top_level_module(contents: list[str]) -> None:
    tops = {name.split("/")[0] for name in contents}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"perdure"}


@pytest.mark.slow
def test_the_wheel_has_every_module_of_every_room(contents: list[str]) -> None:
    sources = [path for room in rooms() for path in room.rglob("*.py")]
    expected = {f"perdure/{path.relative_to(ROOT)}" for path in [*sources, *ROOT.glob("*.py")]}

    assert {name for name in contents if name.endswith(".py")} == expected


@pytest.mark.slow
def test_the_wheel_has_its_data(contents: list[str]) -> None:
    files = [*ROOT.glob("examples/*.yaml"), *ROOT.glob("stores/migrations/*.mako")]
    data = {f"perdure/{path.relative_to(ROOT)}" for path in files}

    assert {name for name in data if name.endswith(".yaml")}
    assert data | {"perdure/py.typed"} <= set(contents)
    assert any(
        re.fullmatch(r"perdure/stores/migrations/versions/0001_\w+\.py", x) for x in contents
    )
    assert any(re.search(r"\.dist-info/(licenses/)?LICENSE$", name) for name in contents)


@pytest.mark.slow
def test_the_wheel_can_be_installed_and_imported(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel)

    printed = run(python, "-c", "import perdure; print(perdure.__version__, perdure.__file__)")

    version, file = printed.split()
    assert version == perdure.__version__
    assert Path(file).is_relative_to(tmp_path)
