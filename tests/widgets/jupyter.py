"""A real JupyterLab with a real browser; its own port, home and token, and no waiting by time."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
READY = """() => {
  const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
  return session?.isReady && session.session?.kernel?.status === "idle";
}"""
RUN = """([index]) => {
  const panel = window.jupyterapp.shell.currentWidget;
  panel.content.activeCellIndex = index;
  panel.content.deselectAll();
  window.xorlRuns = window.xorlRuns || {};
  window.xorlRuns[index] = (window.xorlRuns[index] || 0) + 1;
  window.xorlDone = window.xorlDone || {};
  window.xorlDone[index] = false;
  window.jupyterapp.commands.execute("notebook:run-cell").then(() => {
    window.xorlDone[index] = true;
  });
}"""
SAVE = "() => window.jupyterapp.shell.currentWidget.context.save()"


def chromium() -> str | None:
    """Where the browser is, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Server:
    """A JupyterLab on a free port of this machine.

    Args:
        folder: an empty folder for its home and its notebooks.
        source: folder from which kernels import the package.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.token = secrets.token_hex(16)
        self._log = folder / "jupyter.log"
        home = folder / "home"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        env = dict(os.environ) | {
            "HOME": str(home),
            "IPYTHONDIR": str(home / "ipython"),
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_DATA_DIR": str(home / "data"),
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "PYTHONPATH": str(source),
            "OMP_NUM_THREADS": "1",
        }
        home.mkdir()
        self._settings = home / "settings" / "@jupyterlab"
        self._set("notebook-extension", "tracker", {"windowingMode": "none"})
        self._set(
            "apputils-extension", "notification", {"fetchNews": "false", "checkForUpdates": False}
        )
        self.theme("light")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"),
                    "--expose-app-in-browser",
                    "--ServerApp.ip=127.0.0.1",
                    f"--ServerApp.port={port}",
                    "--ServerApp.port_retries=0",
                    f"--IdentityProvider.token={self.token}",
                    f"--ServerApp.root_dir={self.work}",
                ],
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self._wait()

    def theme(self, name: str) -> None:
        """Choose ``light`` or ``dark`` for pages opened from now on."""
        self._set("apputils-extension", "themes", {"theme": f"JupyterLab {name.capitalize()}"})

    def write(self, name: str, cells: list[str]) -> None:
        """Make a notebook of code cells."""
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, self.work / name)

    def close(self) -> None:
        """End the server and its kernels."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _set(self, extension: str, plugin: str, values: dict[str, object]) -> None:
        path = self._settings / extension / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    def _wait(self) -> None:
        pause = threading.Event()
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/api", timeout=1).close()
                return
            if self._process.poll() is not None:
                break
            pause.wait(0.1)
        self.close()
        raise RuntimeError("JupyterLab did not start:\n" + self._log.read_text()[-3000:])


class Notebook:
    """A notebook in a browser page.

    Args:
        page: an empty page.
        server: where the notebook is.
        name: file name of the notebook.
    """

    def __init__(self, page: Page, server: Server, name: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.outside: list[str] = []
        self._server = server
        self._name = name
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._request)
        self.open()

    def open(self) -> None:
        """Load the page, or load it again, and wait for the kernel."""
        url = f"{self._server.url}/lab/tree/{self._name}?reset&token={self._server.token}"
        self.page.goto(url, wait_until="domcontentloaded")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)

    def idle(self) -> None:
        """Wait until the kernel has nothing to do."""
        self.page.wait_for_function(READY, timeout=90_000)

    def start(self, index: int) -> None:
        """Run a cell without waiting for its end."""
        self.page.evaluate(RUN, [index])

    def run(self, index: int, seconds: float = 20) -> None:
        """Run a cell to its end."""
        self.start(index)
        self.wait("i => window.xorlDone[i]", index, seconds)

    def wait(self, condition: str, argument: object = None, seconds: float = 20) -> None:
        """Wait until a condition in JavaScript holds."""
        self.page.wait_for_function(condition, arg=argument, timeout=seconds * 1000)

    def save(self) -> str:
        """Save the notebook and return what was written."""
        self.page.evaluate(SAVE)
        return (self._server.work / self._name).read_text()

    def output(self, index: int) -> str:
        """The text below a cell."""
        area = self.page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".jp-OutputArea")
        return area.first.inner_text()

    def _console(self, message: object) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _request(self, request: object) -> None:
        host = self._server.url.removeprefix("http")
        own = (f"http{host}", f"ws{host}", "data:", "blob:")
        if not request.url.startswith(own):
            self.outside.append(request.url)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium with a fresh profile."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
        try:
            yield started
        finally:
            started.close()
