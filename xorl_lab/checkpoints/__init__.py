"""Checkpoints: folders in open formats.  Nothing here imports torch."""

from xorl_lab.checkpoints.folder import glance, read, recover, write
from xorl_lab.checkpoints.names import Address, check_name

__all__ = ["Address", "check_name", "glance", "read", "recover", "write"]
