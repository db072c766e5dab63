"""What a person types in a notebook: a lab, the runs on it, and losses to look at."""

from xorl_lab.lab.curves import loss_curve
from xorl_lab.lab.explorer import explore_losses
from xorl_lab.lab.lab import Lab
from xorl_lab.lab.run import Run
from xorl_lab.lab.track import Track

__all__ = ["Lab", "Run", "Track", "explore_losses", "loss_curve"]
