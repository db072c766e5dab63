"""A fresh process up to its first reward, as a notebook would be: run by the case ``start``."""

import sys

from xorl_lab.client import ServiceClient
from xorl_lab.recipes import tasks
from xorl_lab.recipes.grpo import grpo


def main() -> None:
    """Import, load, take one step."""
    client = ServiceClient().create_lora_training_client(sys.argv[1], 16, seed=0)
    task = tasks.get("addition")
    record = next(grpo(client, task.training, task.reward, **task.settings))
    sys.stdout.write(f"{record.metrics['reward']}\n")


if __name__ == "__main__":
    main()
