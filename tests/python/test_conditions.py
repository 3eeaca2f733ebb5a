"""What a host, a framework or a user may do to a process: forks, limits, signals, an early end, other interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., subprocess.CompletedProcess[str]]

#: A layer, a training step on it, and the bytes of everything that the step gave.
STEP = """
import os, signal, sys, threading, time
import torch, moesaic
from moesaic import _core

torch.manual_seed(0)
E, H, I, T, K, R = 4, 64, 96, 50, 2, 4
layer = moesaic.ExpertsLayer(torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 10)
lora = moesaic.Lora(gate_up=moesaic.LoraPair(torch.randn(E, R, H), torch.randn(E, 2 * I, R), 0.1))
hidden, weights, d_out = torch.randn(T, H), torch.rand(T, K), torch.randn(T, H)
ids = torch.rand(T, E).topk(K).indices

def step(layer=layer):
    out, saved = layer.forward(hidden, ids, weights, lora)
    grads = layer.backward(saved, d_out)
    pair = grads.lora[0].gate_up
    return b"".join(t.numpy().tobytes() for t in (out, grads.hidden, grads.top_k_weights, pair.a, pair.b))
"""


def program(body: str) -> str:
    return STEP + textwrap.dedent(body)


def check(result: subprocess.CompletedProcess[str], expected: str = "ok\n") -> None:
    assert result.returncode == 0 and result.stdout == expected, (result.returncode, result.stdout, result.stderr)


FORKS = program("""
# A data loader's pattern: workers are forked from a process that computes, and compute themselves.
forks, source = int(sys.argv[1]), sys.argv[2]
_core.set_thread_source(source)
expected = step()
stop = threading.Event()

def compute():
    while not stop.is_set():
        step()

if source == "own":  # from another thread too, while the main thread forks
    threading.Thread(target=compute).start()
for n in range(forks):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if n % 4 or step() == expected else 1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, (n, status)
    if n % 10 == 0:
        assert step() == expected
stop.set()
print("ok")
""")


@pytest.mark.parametrize("source", ["openmp", "own"])
def test_forks_like_a_data_loaders(source: str, tmp_path: object) -> None:
    forks = int(os.environ.get("MOESAIC_TEST_FORKS", "60"))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, str(forks), source],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120 + forks,
        check=False,
    )
    check(result)


def test_a_data_loader_beside_training(run_python: RunPython) -> None:
    check(
        run_python(
            program("""
            class Rows(torch.utils.data.Dataset):
                def __len__(self):
                    return 24

                def __getitem__(self, n):
                    return step() == expected  # in a forked worker

            expected = step()
            loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
            for epoch in range(2):
                for batch in loader:
                    assert batch.all() and step() == expected
            print("ok")
            """)
        )
    )


def test_exec_after_use(run_python: RunPython) -> None:
    check(
        run_python(
            program("""
            step()
            busy = threading.Thread(target=lambda: [step() for _ in range(10**9)], daemon=True)
            busy.start()
            time.sleep(0.05)
            os.execv(sys.executable, [sys.executable, "-c", "import moesaic; print('ok')"])
            """)
        )
    )


@pytest.mark.parametrize("source", ["openmp", "own"])
def test_the_interpreter_ends_with_work_in_flight(run_python: RunPython, source: str) -> None:
    """Daemon threads in the middle of a long call, and in every part of short ones."""
    check(
        run_python(
            program("""
            sys.setswitchinterval(1e-5)
            step()
            many = torch.randn(60_000, H)
            call = many, torch.zeros(60_000, 4, dtype=torch.int64), torch.ones(60_000, 4)
            def short_calls():
                while True:
                    _, saved = layer.forward(hidden, ids, weights, lora)
                    layer.backward(saved, d_out)
            for _ in range(2):
                threading.Thread(target=layer.forward, args=call, daemon=True).start()
            for _ in range(3):
                threading.Thread(target=short_calls, daemon=True).start()
            time.sleep(0.1)
            print("ok")
            """),
            MOESAIC_THREAD_SOURCE=source,
        )
    )


def test_daemon_threads_end_quietly(run_python: RunPython) -> None:
    """Once the interpreter is about to end, calls of other threads raise SystemExit; the ending thread may go on."""
    result = run_python(
        program("""
        import atexit
        def loop():
            while True:
                step()
        threads = [threading.Thread(target=loop, daemon=True) for _ in range(3)]
        def finish():  # registered before the package was imported, it would run after the package's own
            for thread in threads: thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
            assert step() == expected
            print("ok", flush=True)
        expected = step()
        for thread in threads: thread.start()
        """).replace("import torch, moesaic", "import atexit, torch; atexit.register(lambda: finish()); import moesaic")
    )
    check(result)
    assert result.stderr == ""


def test_one_cpu(run_python: RunPython) -> None:
    check(
        run_python(
            "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
            + program("""
            assert moesaic.get_num_threads() == 1, moesaic.get_num_threads()
            alone = step()
            moesaic.set_num_threads(3)
            assert step() == alone
            print("ok")
            """)
        )
    )


def test_huge_pages_change_nothing(run_python: RunPython) -> None:
    body = program("""
    import hashlib
    large = torch.zeros(9000, H)
    layer.forward(large, torch.zeros(9000, 1, dtype=torch.int64), torch.ones(9000, 1))
    print(hashlib.sha256(step()).hexdigest())
    """)
    never = "import ctypes\nassert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0\n"  # PR_SET_THP_DISABLE
    with_pages, without = run_python(body), run_python(never + body)
    assert with_pages.returncode == without.returncode == 0, with_pages.stderr + without.stderr
    assert with_pages.stdout == without.stdout != ""


def test_no_address_space(run_python: RunPython) -> None:
    check(
        run_python(
            program("""
            import resource
            expected = step()

            def limit(more):
                used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))

            tokens = 200_000
            big = torch.zeros(tokens, H, dtype=torch.bfloat16)
            big_ids, big_weights = torch.zeros(tokens, 8, dtype=torch.int64), torch.zeros(tokens, 8)
            small = torch.zeros(1, dtype=torch.bfloat16).expand(64, 2 * 4096, 1024)
            small_down = torch.zeros(1, dtype=torch.bfloat16).expand(64, 1024, 4096)
            failures = 0
            in_use = moesaic.memory_stats()["in_use_bytes"]
            for more in range(0, 1 << 30, 192 << 20):
                limit(more)
                for call in (lambda: layer.forward(big, big_ids, big_weights, lora),
                             lambda: moesaic.ExpertsLayer(small, small_down)):
                    try:
                        call()
                    except MemoryError:
                        failures += 1
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
                    assert step() == expected
                    moesaic.trim_memory()
                    assert moesaic.memory_stats()["in_use_bytes"] == in_use
                    limit(more)
            assert failures >= 3, failures
            print("ok")
            """)
        )
    )


def test_ctrl_c_during_a_long_call(run_python: RunPython) -> None:
    """The handler runs when the call returns, and nothing is left of the call."""
    check(
        run_python(
            program("""
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
            tokens = 30_000
            long = torch.randn(tokens, H)
            long_ids, long_weights = torch.randint(0, E, (tokens, 8)), torch.rand(tokens, 8)
            expected, interrupts = step(), 0
            moesaic.trim_memory()
            in_use = moesaic.memory_stats()["in_use_bytes"]
            for n in range(6):
                threading.Timer(0.01 + 0.01 * n, os.kill, (os.getpid(), signal.SIGINT)).start()
                began = time.monotonic()
                try:
                    while time.monotonic() - began < 30:
                        layer.forward(long, long_ids, long_weights, lora)
                except KeyboardInterrupt:
                    interrupts += 1
                assert step() == expected
                assert moesaic.memory_stats()["in_use_bytes"] == in_use
            assert interrupts == 6, interrupts
            print("ok")
            """)
        )
    )


def test_threads_by_the_hundred(run_python: RunPython) -> None:
    check(
        run_python(
            program("""
            _core.set_thread_source("own")  # libgomp keeps a team for each thread that ever called
            expected, right = step(), []
            for _ in range(100):
                threads = [threading.Thread(target=lambda: right.append(step() == expected)) for _ in range(4)]
                for thread in threads: thread.start()
                for thread in threads: thread.join()
            assert right == [True] * 400
            tasks = len(os.listdir("/proc/self/task"))
            assert tasks < 64, tasks
            print("ok")
            """)
        )
    )


@pytest.mark.skipif(sys.version_info < (3, 12), reason="interpreters of their own came with Python 3.12")
def test_other_interpreters_are_refused(run_python: RunPython) -> None:
    check(
        run_python(
            program("""
            try:
                import _interpreters as interpreters
            except ImportError:
                import _xxsubinterpreters as interpreters
            expected = step()
            for config in ("isolated", "legacy"):
                other = interpreters.create(config) if sys.version_info >= (3, 13) else interpreters.create()
                failure = interpreters.run_string(other, '''
            try:
                import moesaic
            except ImportError as error:
                assert "main interpreter" in str(error), error
            else:
                raise SystemExit("imported")
            ''')
                assert failure is None, failure
                interpreters.destroy(other)
            assert step() == expected
            print("ok")
            """)
        )
    )


def test_memory_after_a_thousand_steps(run_python: RunPython) -> None:
    """Within 1% of what it was after a hundred: resident, once malloc has returned what is free, and in tensors."""
    check(
        run_python(
            program("""
            import ctypes
            libc = ctypes.CDLL(None)
            leaves = [torch.randn(E, R, H, requires_grad=True), torch.randn(E, 2 * I, R, requires_grad=True)]
            optimizer = torch.optim.AdamW(leaves)
            def train(steps):
                for n in range(steps):
                    x = hidden.clone().requires_grad_()
                    pair = moesaic.LoraPair(*leaves, 0.1)
                    out = moesaic.moe_experts(x, ids, weights, layer, moesaic.Lora(gate_up=pair))
                    out.square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            def held():
                libc.malloc_trim(0)
                used = int(open("/proc/self/statm").read().split()[1])
                return used, moesaic.memory_stats()["in_use_bytes"]
            train(100)
            before = held()
            train(900)
            after = held()
            assert after[0] <= 1.01 * before[0] and after[1] <= before[1], (before, after)
            print("ok")
            """)
        )
    )


#: Answers EPERM to the system calls that `code` lets through to its last line but one.
DENY = """
import ctypes, struct
code = [(0x20, 0, 0, 0), CODE, (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]  # the system call; EPERM; allowed
filter = b"".join(struct.pack("HBBI", *line) for line in code)
buffer = ctypes.create_string_buffer(filter)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
"""
#: arch_prctl, if its first argument is ARCH_REQ_XCOMP_PERM, by which a process asks for the tile registers.
DENY_AMX = (
    DENY.replace("CODE", "(0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023)")
    + "assert libc.syscall(158, 0x1023, 18) == -1 and ctypes.get_errno() == 1\n"
)
DENY_MBIND = DENY.replace("CODE", "(0x15, 0, 1, 237)")


def test_amx_permission_denied(run_python: RunPython) -> None:
    """Another tier serves, and doctor says why; on a host without AMX nothing changes."""
    check(
        run_python(
            DENY_AMX
            + program("""
            tiers = {tier["name"]: tier for tier in _core.isa_tiers()}
            amx = tiers["amx_bf16"]
            assert not amx["permitted"] and not amx["chosen"] and moesaic.isa() != "amx_bf16"
            assert step() == step() and _core.verify_isa(moesaic.isa()) and not _core.verify_isa("amx_bf16")
            print("ok")
            """)
        )
    )
    result = run_python(DENY_AMX + "import moesaic\nmoesaic.isa()", MOESAIC_ISA="amx_bf16")
    assert result.returncode == 1 and "UnsupportedHostError" in result.stderr, result.stderr


def test_binding_memory_denied(run_python: RunPython) -> None:
    """A container's filter of system calls: the engine works, and says why weights are placed by first touch."""
    check(
        run_python(
            DENY_MBIND
            + program("""
            assert all(node["bind_error"] == "Operation not permitted" for node in _core.numa())
            assert step() == step()
            print("ok")
            """)
        )
    )


def test_pretended_numa_nodes(run_python: RunPython) -> None:
    """Weights are divided among the nodes of the topology, whichever threads compute, and the results are close."""
    topology = Path(__file__).parents[1] / "threadpool" / "data" / "two_packages.xml"
    body = program("""
    bits = {step()}
    for source in ("own", "openmp"):
        for threads in (1, 2, 5):
            _core.set_thread_source(source)
            moesaic.set_num_threads(threads)
            bits.add(step())
    assert len(bits) == 1
    values = torch.frombuffer(bytearray(bits.pop()), dtype=torch.float32)
    print([shard[1:] for shard in layer._core.shards], values.norm().item())
    """)
    whole, divided = run_python(body), run_python(body, MOESAIC_HWLOC_XML=str(topology))
    assert whole.returncode == 0 and divided.returncode == 0, (whole.stderr, divided.stderr)
    one, two = whole.stdout.rsplit(maxsplit=1), divided.stdout.rsplit(maxsplit=1)
    assert two[0] == "[(0, 64), (64, 32)]"
    assert abs(float(one[1]) - float(two[1])) <= 5e-3 * float(one[1])


def test_amx_beside_a_small_signal_stack(run_python: RunPython) -> None:
    """The kernel refuses tiles to a process with a signal stack that could not hold them: another tier serves.

    8,192 bytes hold the frame of AVX-512 (3,632) and Python's handler above it, but not the 8,192 bytes of the tiles.
    """
    check(
        run_python(
            """
import ctypes
stack = ctypes.create_string_buffer(8192)
class Stack(ctypes.Structure):
    _fields_ = [("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(stack), 0, 8192)), None) == 0
"""
            + program("""
            assert _core.verify_isa(moesaic.isa()) and step() == step()
            got = []
            signal.signal(signal.SIGALRM, lambda *_: got.append(1))
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            expected = step()
            while len(got) < 20:
                assert step() == expected
            signal.setitimer(signal.ITIMER_REAL, 0)
            print("ok")
            """)
        )
    )
