"""What a server is told when it starts."""

from dataclasses import dataclass, field
from pathlib import Path

from xorl_lab.errors import ConfigError
from xorl_lab.home import home as default_home
from xorl_lab.server.security import LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server; everything but the model has a default."""

    model: str
    """The base model that it serves: a name or a folder."""
    full: bool = False
    """Train full weights; False = LoRA adapters."""
    host: str = "127.0.0.1"
    """Address to listen on.  Any other than a loopback address needs a token."""
    port: int = 6000
    """Port of the whole API; 0 = any free one."""
    sampler_port: int = 30000
    """Second port, where ``/generate`` is looked for; 0 = none."""
    home: Path | None = None
    """Folder of checkpoints; None = ``$XORL_LAB_HOME`` or ``~/.xorl_lab``."""
    token: str | None = field(default=None, repr=False)
    """If set, requests must carry ``Authorization: Bearer TOKEN``."""
    sampler_key: str | None = field(default=None, repr=False)
    """Bearer token that is sent to every SGLang server that a client registers."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``mps``."""
    dtype: str = "auto"
    """``auto``, ``float32`` or ``bfloat16``."""
    save_on_shutdown: bool = True
    """Save models with unsaved steps when the server is stopped."""
    poll_seconds: float = 45.0
    """How long ``retrieve_future`` waits before it answers ``try_again``."""
    gap_seconds: float = 10.0
    """How long requests wait for one with a smaller sequence number that has not arrived."""
    drain_seconds: float = 10.0
    """How long a server that is being stopped waits for what is queued before it cancels it."""
    max_body_bytes: int = 256 * 2**20
    """Largest request body."""
    kept_requests: int = 4096
    """Finished requests whose answers can still be fetched."""
    kept_bytes: int = 64 * 2**20
    """Memory that these answers may take."""

    def __post_init__(self) -> None:
        if self.token is not None and not self.token.strip():
            raise ConfigError("token is empty: pass a long random one, or leave it out")
        if self.host not in LOOPBACK and self.token is None:
            raise ConfigError(
                f"host is {self.host!r}, which other machines can reach: pass --token (or set "
                "XORL_API_KEY), or listen on 127.0.0.1"
            )
        for name in ("port", "sampler_port"):
            value = getattr(self, name)
            if not 0 <= value <= 65535:
                raise ConfigError(f"{name} is {value}: pass a number from 0 to 65535")
        if self.port and self.port == self.sampler_port:
            raise ConfigError(
                f"port and sampler_port are both {self.port}: /generate is served on the first "
                "anyway, so pass --sampler-port 0 or another number"
            )

    @property
    def root(self) -> Path:
        """Folder of all checkpoints."""
        return Path(self.home or default_home()).expanduser() / "checkpoints"
