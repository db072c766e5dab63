"""Keep transformers from writing progress bars and warnings into a user's notebook."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet() -> Generator[None]:
    """Silence transformers inside the block, and restore the caller's settings after it."""
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
