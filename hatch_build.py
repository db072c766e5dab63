"""Builds the front end into the package, when it is missing or older than its sources.

The notebooks go into wheels too.

Called by hatchling for wheels, sdists and editable installs, and by `make front`.
"""

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def sources_hash(root: Path) -> str:
    """SHA-256 over what the bundle is made of; ``widgets/build.mjs`` records the same."""
    folder = root / "widgets"
    names = ["build.mjs", "package.json", "package-lock.json"]
    names += [f"src/{path.name}" for path in (folder / "src").iterdir()]
    total = hashlib.sha256()
    for name in sorted(names):
        content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        total.update(f"{name} {content}\n".encode())
    return total.hexdigest()


def build_front_end(root: Path) -> bool:
    """Build the bundle unless it is up to date; True if it was built.

    Raises:
        RuntimeError: npm is missing or failed.
    """
    recorded = root / "xorl_lab" / "widgets" / "static" / "sources.sha256"
    folder = root / "widgets"
    if not (folder / "src").is_dir():
        if recorded.exists():
            return False
        raise RuntimeError(f"the front end is neither built nor are its sources in {folder}")
    if recorded.exists() and recorded.read_text().strip() == sources_hash(root):
        return False
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(
            "the front end of xorl_lab has to be built, and npm was not found: install Node.js 20 "
            "or newer, which brings npm, and try again"
        )
    if not (folder / "node_modules" / "esbuild").is_dir():
        _run([npm, "ci", "--omit=dev", "--no-audit", "--no-fund"], folder)
    _run([npm, "run", "build"], folder)
    return True


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"`{' '.join(command)}` failed in {folder}:\n{said}")


class FrontEndHook(BuildHookInterface[Any]):
    """Sees to it that whatever is built or installed has the front end in it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        root = Path(self.root)
        build_front_end(root)
        if self.target_name == "wheel" and version != "editable":
            for path in sorted((root / "notebooks").glob("*.ipynb")):
                build_data["force_include"][str(path)] = f"xorl_lab/notebooks/{path.name}"


if __name__ == "__main__":
    build_front_end(Path(__file__).resolve().parent)
