"""What every Python test shares."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before PyTorch loads its OpenMP. Its threads otherwise spin after each region, and on a host that is busy with more
# than these tests every tiny operation waits for a core. Results do not depend on it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

import moesaic
from moesaic import _core
from moesaic.perf import Machine


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same seed, threads and thread source, whatever another one left."""
    threads, source = moesaic.get_num_threads(), _core.get_thread_source()
    torch.manual_seed(0)
    yield
    moesaic.set_num_threads(threads)
    _core.set_thread_source(source)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a fresh interpreter: ``run_python(source, MOESAIC_ISA="portable")``."""

    def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Opens an address in a browser without a window: the document as scripts left it, and on stderr their messages."""
    if shutil.which("chromium") is None:
        pytest.skip("no chromium on this host")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command.append(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")

    def browse(address: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=False)

    try:
        blank = browse("about:blank")
    except subprocess.TimeoutExpired:
        pytest.skip("chromium does not answer on this host")
    if "<html" not in blank.stdout:
        pytest.skip(f"chromium does not run on this host: {blank.stderr[-300:]}")
    return browse


@pytest.fixture(scope="module", params=Machine.names())
def machine(request: pytest.FixtureRequest) -> Machine:
    """Each description that comes with the package."""
    return Machine.named(request.param)


@pytest.fixture(scope="module")
def here() -> Machine:
    """A description of this host with the figures of another: what is run here is not compared with times."""
    like = Machine.named("zen5-2c")
    kernels = {moesaic.isa(): like.kernels["avx512_bf16"]}
    name, cpu = platform.node() or "here", _core.cpu_name()
    return dataclasses.replace(
        like, name=name, cpu=cpu, source="measured", isa=moesaic.isa(), kernels=kernels, threads=2, l3_bytes=1 << 20
    )
