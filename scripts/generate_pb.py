"""Generates extproc/pb from proto/: messages with grpcio-tools, their typed stubs with mypy-protobuf.

    python scripts/generate_pb.py           # write extproc/pb
    python scripts/generate_pb.py --check   # exit 1 and name each file that is not what proto/ yields

Runs from any directory. No gRPC stubs are generated: the server registers generic handlers under Envoy's service names.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("extproc", "pb")
MENDS = "make proto"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 for stale files under --check, 2 when a generator is missing or fails."""
    parser = argparse.ArgumentParser(description="Generate extproc/pb from proto/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is stale")
    check = parser.parse_args(arguments).check
    try:
        generated = generate()
    except GeneratorError as error:
        print(f"generate_pb: {error}", file=sys.stderr)  # noqa: T201
        return 2
    changed = stale(generated, ROOT / PACKAGE)
    if check:
        for name in changed:
            print(f"{PACKAGE / name} is not what {PROTO.name}/ yields. Run: {MENDS}", file=sys.stderr)  # noqa: T201
        return 1 if changed else 0
    for name in changed:
        write(ROOT / PACKAGE / name, generated.get(name))
        print(f"{'wrote' if name in generated else 'removed'} {PACKAGE / name}")  # noqa: T201
    return 0


class GeneratorError(Exception):
    """A generator is missing or refused the sources. The text says which, and what to do."""


def generate() -> dict[str, bytes]:
    """The content of every generated file by its name within extproc/pb. Raises GeneratorError."""
    sources = sorted(path.relative_to(PROTO).as_posix() for path in (PROTO / PACKAGE).glob("*.proto"))
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, "-m", "grpc_tools.protoc",
            f"--proto_path={PROTO}",
            f"--plugin=protoc-gen-mypy={mypy_plugin()}",
            f"--python_out={out}",
            f"--mypy_out=quiet:{out}",
            *sources,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise GeneratorError(f"protoc failed:\n{done.stderr.strip()}")
        return {path.name: path.read_bytes() for path in Path(out, PACKAGE).iterdir()}


def mypy_plugin() -> str:
    """The path of protoc-gen-mypy. Looked for beside the interpreter first: a venv need not be on PATH."""
    found = shutil.which("protoc-gen-mypy", path=str(Path(sys.executable).parent)) or shutil.which("protoc-gen-mypy")
    if found is None:
        raise GeneratorError(f"protoc-gen-mypy is missing beside {sys.executable}; install the dev extra.")
    return found


def stale(generated: dict[str, bytes], folder: Path) -> list[str]:
    """Names of files in `folder` that are missing, that differ, or whose source is gone."""
    present = {path.name: path.read_bytes() for path in folder.glob("*_pb2.py*")}
    return sorted(name for name in generated.keys() | present.keys() if generated.get(name) != present.get(name))


def write(path: Path, content: bytes | None) -> None:
    """None removes the file."""
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
