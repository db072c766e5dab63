"""The command line of a server and the memory it takes, on a CPU and on a GPU that is not here."""

import subprocess
from pathlib import Path

import pytest

from xorl_lab.errors import ConfigError
from xorl_lab.samplers.sglang import install as sglang_install
from xorl_lab.samplers.sglang import plan as sglang_plan
from xorl_lab.samplers.sglang.models import Served
from xorl_lab.samplers.sglang.plan import Wishes

GIB = 2**30
SMALL = Served("small", Path("/models/small"), 8192, 541_000_000, 2 * 30 * 3 * 64, experts=False)
MIXTURE = Served("mixture", Path("/models/moe"), 512, 2_000_000, 2 * 4 * 2 * 16, experts=True)
PYTHON = Path("/sglang/bin/python")


def options(line: list[str]) -> dict[str, list[str]]:
    """The words behind each option."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in line:
        if word.startswith("--"):
            name = word
            assert name not in found
        found.setdefault(name, []).append(word)
    return {name: words[1:] for name, words in found.items() if name}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with this much free memory, that SGLang sees as well."""

    def put(free: int, sglang: bool = True) -> None:
        def answer(command, **_):
            assert command[0] == str(PYTHON)
            return subprocess.CompletedProcess(command, 0, f"{sglang}\n", "")

        cuda = sglang_plan.torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(cuda, "mem_get_info", lambda: (free, 2 * free))
        monkeypatch.setattr(sglang_plan.subprocess, "run", answer)

    return put


def test_on_a_cpu():
    plan = sglang_plan.make(SMALL, PYTHON, Wishes(device="cpu", threads=3))
    line = sglang_plan.command(plan, 4321)
    assert line[:2] == [str(PYTHON), str(sglang_install.CPU_FOLDER / "launch.py")]
    assert Path(line[1]).is_file()
    given = options(line)
    assert given["--host"] == ["127.0.0.1"]
    assert given["--port"] == ["4321"]
    assert given["--model-path"] == ["/models/small"]
    assert given["--dtype"] == ["float32"]
    assert given["--device"] == ["cpu"]
    assert given["--attention-backend"] == ["torch_native"]
    assert given["--max-lora-rank"] == ["32"]
    assert given["--lora-backend"] == ["torch_native"]
    assert len(given["--lora-target-modules"]) == 7
    assert "--sleep-on-idle" in given
    assert not given.keys() & {"--mem-fraction-static", "--enable-memory-saver"}
    assert not given.keys() & {"--enable-return-routed-experts", "--api-key"}


def test_without_adapters():
    plan = sglang_plan.make(SMALL, PYTHON, Wishes(device="cpu", max_rank=None))
    assert not any("lora" in word for word in sglang_plan.command(plan, 1))


def test_a_mixture_has_adapters_on_attention_and_tells_its_experts():
    plan = sglang_plan.make(MIXTURE, PYTHON, Wishes(device="cpu", experts=True))
    given = options(sglang_plan.command(plan, 1))
    assert given["--enable-return-routed-experts"] == []
    assert given["--lora-target-modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_on_a_gpu(gpu):
    gpu(40 * GIB)
    plan = sglang_plan.make(SMALL, PYTHON, Wishes())
    line = sglang_plan.command(plan, 4321)
    assert line[:3] == [str(PYTHON), "-m", "sglang.launch_server"]
    given = options(line)
    assert given["--dtype"] == ["bfloat16"]
    assert given["--device"] == ["cuda"]
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= given.keys()
    assert 0.05 < float(given["--mem-fraction-static"][0]) <= sglang_plan.GPU_SHARE
    assert not given.keys() & {"--attention-backend", "--lora-backend", "--sampling-backend"}
    single = sglang_plan.make(SMALL, PYTHON, Wishes(dtype="float32"))
    assert options(sglang_plan.command(single, 1))["--attention-backend"] == ["triton"]


@pytest.mark.parametrize("free", [4 * GIB, 8 * GIB, 24 * GIB, 80 * GIB, 141 * GIB])
def test_half_of_a_gpu_stays_for_training(gpu, free):
    gpu(free)
    plan = sglang_plan.make(SMALL, PYTHON, Wishes())
    token = SMALL.token_numbers * 2
    assert plan.memory_fraction is not None
    static = plan.memory_fraction * free
    assert static <= free / 2
    assert static >= SMALL.weight_bytes + sglang_plan.CACHE_LIMITS[0] * token
    wanted = SMALL.weight_bytes + plan.cache_tokens * token + sglang_plan.GPU_SLACK
    assert static == pytest.approx(min(wanted, free / 2), rel=1e-9)


def test_a_gpu_that_is_too_small(gpu):
    gpu(GIB)
    with pytest.raises(ConfigError, match=r"small takes 0\.6 GiB .* half of the 1\.0 GiB"):
        sglang_plan.make(SMALL, PYTHON, Wishes())


def test_a_gpu_that_sglang_cannot_use(gpu):
    gpu(40 * GIB, sglang=False)
    assert sglang_plan.make(SMALL, PYTHON, Wishes()).device == "cpu"
    with pytest.raises(ConfigError, match="has no CUDA: make one with `xorl-lab sglang --install"):
        sglang_plan.make(SMALL, PYTHON, Wishes(device="cuda"))


def test_a_gpu_that_is_not_there():
    with pytest.raises(ConfigError, match="device 'cuda' is not available here"):
        sglang_plan.make(SMALL, PYTHON, Wishes(device="cuda"))


@pytest.mark.parametrize(
    ("served", "dtype", "budget", "tokens"),
    [
        (SMALL, "float32", GIB, 22 * 1024),
        (SMALL, "bfloat16", GIB, 45 * 1024),
        (SMALL, "float32", 1, 8192),  # a whole context, whatever it takes
        (MIXTURE, "float32", 1, 4096),
        (MIXTURE, "float32", 1000 * GIB, 131072),
    ],
)
def test_tokens_in_the_cache(served, dtype, budget, tokens):
    assert sglang_plan.cache_tokens(served, dtype, budget) == tokens


def test_what_is_asked_for_is_checked():
    for name in ("max_rank", "threads", "cache_tokens"):
        with pytest.raises(ConfigError, match=f"{name} is 0: pass at least 1"):
            Wishes(**{name: 0})
    with pytest.raises(ConfigError, match="device is 'mps'"):
        Wishes(device="mps")
    with pytest.raises(ConfigError, match="dtype is 'float64'"):
        sglang_plan.make(SMALL, PYTHON, Wishes(device="cpu", dtype="float64"))
    with pytest.raises(ConfigError, match="small has no experts"):
        sglang_plan.make(SMALL, PYTHON, Wishes(device="cpu", experts=True))


def test_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert sglang_plan.default_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(sglang_plan.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert sglang_plan.default_threads() == 2
    monkeypatch.setattr(sglang_plan.os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert sglang_plan.default_threads() == 1


def test_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    plan = sglang_plan.make(SMALL, PYTHON, Wishes(device="cpu", threads=3))
    given = sglang_plan.environment(plan, tmp_path)
    assert given["OMP_NUM_THREADS"] == "3"
    assert given["SGLANG_USE_CPU_ENGINE"] == "1"
    assert given["TMPDIR"] == str(tmp_path)
    assert "PYTHONPATH" not in given
