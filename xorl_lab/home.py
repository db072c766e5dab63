"""Where this machine keeps models, runs and checkpoints."""

import os
from pathlib import Path


def home() -> Path:
    """The folder of everything that xorl_lab keeps between sessions.

    Returns:
        ``$XORL_LAB_HOME`` if that is set and not empty, else ``~/.xorl_lab``.  It need not exist.
    """
    chosen = os.environ.get("XORL_LAB_HOME", "").strip()
    return Path(chosen).expanduser() if chosen else Path.home() / ".xorl_lab"
