"""Names and addresses of checkpoints.

The name rules are those of pytrio's documentation ("Checkpoint Name Rules").
"""

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from xorl_lab.errors import CheckpointError

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?")
MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
KINDS = ("weights", "sampler_weights")
MAX_LENGTH = 200
KEPT, DIGEST = 180, 20

logger = logging.getLogger(__name__)


def check_name(name: object) -> str:
    """Normalise and validate the name of a checkpoint.

    Spaces become hyphens; more than 200 characters become the first 180 and 20 hexadecimal digits
    of the full name's SHA-256.  Both are logged as warnings.

    >>> check_name("step-100")
    'step-100'

    Raises:
        CheckpointError: ``validation.invalid_checkpoint_name``: not a string, or not of the form.
    """
    normalised = name.replace(" ", "-") if isinstance(name, str) and name[:1] != " " else None
    if normalised is None or not NAME.fullmatch(normalised):
        raise CheckpointError(
            "validation.invalid_checkpoint_name",
            f"{name!r} cannot name a checkpoint: start with an ASCII letter or digit, go on with "
            "letters, digits, '.', '_' or '-', and do not end with '.'",
            {"name": name},
        )
    if normalised != name:
        logger.warning("checkpoint name %r was changed to %r", name, normalised)
    if len(normalised) > MAX_LENGTH:
        digest = hashlib.sha256(normalised.encode()).hexdigest()
        shortened = normalised[:KEPT] + digest[:DIGEST]
        logger.warning("checkpoint name %r was shortened to %r", normalised, shortened)
        return shortened
    return normalised


def check_model_id(model_id: object) -> str:
    """Validate a model id: it becomes a folder's name.

    Raises:
        CheckpointError: ``validation.invalid_model_id``.
    """
    if not isinstance(model_id, str) or not MODEL_ID.fullmatch(model_id):
        raise CheckpointError(
            "validation.invalid_model_id",
            f"{model_id!r} cannot name a model: use 1 to 128 letters, digits, '_' and '-', and "
            "start with a letter or digit",
            {"model_id": model_id},
        )
    return model_id


@dataclass(frozen=True, slots=True)
class Address:
    """Where a checkpoint lives: ``xorl://MODEL/KIND/NAME``.

    >>> Address.parse("xorl://default/weights/step-1")
    Address(model_id='default', kind='weights', name='step-1')
    """

    model_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, uri: object) -> "Address":
        """Take a URI apart.

        Raises:
            CheckpointError: ``validation.invalid_checkpoint_path``, or the codes of its parts.
        """
        match = (
            re.fullmatch(r"xorl://([^/]+)/([^/]+)/([^/]+)", uri) if isinstance(uri, str) else None
        )
        if match is None or match[2] not in KINDS:
            raise CheckpointError(
                "validation.invalid_checkpoint_path",
                f"{uri!r} is no checkpoint: pass what save_state returned as its path, of the form "
                "xorl://MODEL/weights/NAME",
                {"path": uri},
            )
        return cls(check_model_id(match[1]), match[2], check_name(match[3]))

    @property
    def uri(self) -> str:
        """The address as text."""
        return f"xorl://{self.model_id}/{self.kind}/{self.name}"

    def folder(self, root: Path) -> Path:
        """Its folder under a root."""
        return root / self.model_id / self.kind / self.name
