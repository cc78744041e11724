"""What the layout of the code promises, checked."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"
# Parts of the local stack, which plays a client and configures engines.
PLAYERS = {"stack.py", "scene.py"}


def tracked_files() -> list[Path]:
    """What is, or is about to be, in the repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def modules(package: str) -> list[Path]:
    return [path for path in (ROOT / package).rglob("*.py") if "pb" not in path.parts]


def constants(path: Path) -> Iterator[ast.Constant]:
    """Constants of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)


def test_the_import_contracts_are_kept() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


def test_every_rule_of_the_layout_is_a_contract() -> None:
    contracts = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]
    forbidden = {name for contract in contracts for name in contract.get("forbidden_modules", [])}
    assert {"extproc", "enginesim", "asyncio", "time", "socket", "google", "zmq", "aiohttp"} <= forbidden


HEADER = re.compile(r"x-[a-z0-9-]+|retry-after(-ms)?|content-type")


def answer_headers() -> set[str]:
    """The headers that replies.py sets."""
    replies = constants(ROOT / "extproc" / "replies.py")
    return {node.value for node in replies if isinstance(node.value, str) and HEADER.fullmatch(node.value)}


def test_the_headers_of_answers_are_found() -> None:
    assert {"retry-after", "retry-after-ms", "x-headway-reason", "x-gateway-destination-endpoint"} <= answer_headers()


@pytest.mark.parametrize("path", modules("extproc"), ids=lambda path: path.name)
def test_only_replies_names_headers_and_status_codes_of_answers(path: Path) -> None:
    if path.name in {"replies.py"} | PLAYERS:
        return
    # Requests have a content type as well, and the admin's pages.
    ours = answer_headers() - ({"content-type"} if path.name in {"admin.py", "session.py"} else set())
    for constant in constants(path):
        value, place = constant.value, f"{path.name}:{constant.lineno}"
        if isinstance(value, str):
            assert value not in ours, place
            # Requests have names of ours as well; those are in wishes.py.
            assert not value.startswith("x-headway-") or path.name == "wishes.py", place
        elif isinstance(value, int) and not isinstance(value, bool):
            assert value not in {400, 413, 429, 500, 502, 503, 504}, place


@pytest.mark.parametrize("package", ["extproc", "predictor", "enginesim", "tests", "bench"])
def test_nothing_imports_the_folders_that_hold_no_python(package: str) -> None:
    for path in modules(package):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in {"envoy", "proto"}, f"{path}: {name}"


@pytest.mark.parametrize("folder", ["envoy", "proto"])
def test_a_folder_without_python_is_no_package(folder: str) -> None:
    assert list((ROOT / folder).rglob("*.py")) == []


def test_the_packages_of_the_wheel_are_the_three() -> None:
    wheel = tomllib.loads(PYPROJECT.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["extproc", "predictor", "enginesim"]
    for package in wheel["packages"]:
        assert (ROOT / package / "py.typed").exists()


def test_the_domain_is_handed_its_time_and_its_luck() -> None:
    for path in modules("predictor"):
        text = path.read_text()
        assert not re.search(r"\b(monotonic|perf_counter|default_rng)\(", text), path
        assert "open(" not in text, path


# Put together here, so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile("|".join(f"/{place}/" for place in ("work", "home", "Users", "root")) + r"|[A-Z]:\\\w")


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix == ".json":  # a vocabulary may hold anything
            continue
        found = MACHINE_PATHS.search(text)
        assert found is None, f"{path.relative_to(ROOT)}: {found}"


@pytest.mark.parametrize("table", ["dependencies", "stack"])
def test_every_dependency_of_the_product_carries_a_reason(table: str) -> None:
    lines = PYPROJECT.read_text().splitlines()
    start = lines.index(f"{table} = [")
    entries = lines[start + 1 : lines.index("]", start)]
    assert entries
    for entry in entries:
        assert re.fullmatch(r'\s+"[^"]+",\s+# \S.*', entry), entry


def test_every_module_of_the_product_says_what_it_is() -> None:
    for package in ("extproc", "predictor", "enginesim"):
        for path in modules(package):
            assert ast.get_docstring(ast.parse(path.read_text())), path
