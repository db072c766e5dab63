"""What a person types in a notebook: a lab, and the runs on it."""

from xorl_lab.lab.lab import Lab
from xorl_lab.lab.run import Run
from xorl_lab.lab.track import Track

__all__ = ["Lab", "Run", "Track"]
