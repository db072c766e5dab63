"""The client API over HTTP: what xorl_client speaks, and SGLang's ``/generate`` beside it."""

from xorl_lab.server.app import create_app
from xorl_lab.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
