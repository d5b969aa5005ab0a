"""The disk tier: a real file, real faults, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from fxckpt.runtime import file as spill
from fxckpt.runtime import store
from fxckpt.runtime.disk import STAGING_BYTES
from fxckpt.runtime.file import BLOCK, SpillFile, Staging, in_memory
from fxckpt.runtime.transfer import Like
from fxckpt.transform import log
from tests.helpers import Step, differences, train_step
from tests.situations.models import Batch, Residual, stack
from tests.test_runtime import ORDERS, Run, Xs, inputs

WIDE = 64


def model_and_batch() -> tuple[nn.Module, Batch]:
    return stack(lambda: Residual(WIDE), n=4, shape=(600, WIDE))


def on_disk(model: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    offload = fxckpt.Offload(to="disk", dir=str(folder), **settings.pop("offload", {}))
    return fxckpt.transform(model, **{"layers": Residual, "offload": offload, "verify": True, **settings})


@pytest.fixture
def t(tmp_path: Path) -> nn.Module:
    return on_disk(model_and_batch()[0], tmp_path)


@pytest.fixture(scope="module")
def want() -> Step:
    model, batch = model_and_batch()
    return train_step(model, model, batch)


def step(t: nn.Module, run: Any = None) -> Step:
    return train_step(t if run is None else run, t, model_and_batch()[1])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_numbers(t: nn.Module, want: Step, backend: str | None, tmp_path: Path) -> None:
    run = torch.compile(t, backend=backend) if backend else t
    reference = want
    if backend == "inductor":
        model, batch = model_and_batch()
        reference = train_step(torch.compile(model), model, batch)
    for _ in range(3):
        assert not differences(step(t, run).values(), reference.values())
    figures = fxckpt.stats(t)
    assert figures.offloads == figures.reloads == 3
    assert figures.offloaded_bytes == figures.reloaded_bytes == 3 * 600 * WIDE * 4
    assert figures.disk_bytes == figures.offloaded_bytes and figures.host_bytes == 2 * STAGING_BYTES
    assert figures.in_flight_bytes == 2 * 600 * WIDE * 4
    assert figures.offload_seconds > 0 and figures.reload_seconds > 0 and figures.stall_seconds >= 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_calls(order: Callable[[Run, Xs], None], tmp_path: Path) -> None:
    plain, _ = stack()
    order(plain, inputs())
    model, _ = stack()
    order(on_disk(model, tmp_path), inputs())
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_sizes_that_change_use_the_room_again(tmp_path: Path) -> None:
    model, _ = stack()
    t = on_disk(model, tmp_path)
    for rows in (700, 300, 900, 20, 900, 300, 700) * 3:
        t(x=torch.randn(rows, 8)).backward()
    most = 3 * -(-900 * 8 * 4 // BLOCK) * BLOCK
    assert disk_of(t)._file.size <= 2 * most
    assert fxckpt.stats(t).disk_bytes == 3 * 700 * 8 * 4


def disk_of(t: nn.Module) -> Any:
    (disk,) = type(t)._fxckpt_state.store._disks.values()
    return disk


def test_a_word_is_enough(want: Step) -> None:
    model, _ = model_and_batch()
    t = fxckpt.transform(model, layers=Residual, offload="disk")
    assert not differences(step(t).values(), want.values())
    assert fxckpt.stats(t).disk_bytes > 0


# ---- nothing grows, nothing is left ------------------------------------------------------------------------------


def levels_of(t: nn.Module) -> dict[str, int]:
    levels: dict[str, int] = type(t)._fxckpt_state.store._meter.levels()
    return levels


def steps_are_flat(t: nn.Module, run: Any, steps: int) -> None:
    def levels() -> tuple[int, int, int, int]:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        levels = levels_of(t)
        assert levels["disk"] == levels["in_flight"] == 0 and levels["host"] == 2 * STAGING_BYTES
        return open_files(), threading.active_count(), len(tensors), disk_of(t)._file.size

    for _ in range(2):
        step(t, run)
    level = levels()
    for _ in range(steps):
        step(t, run)
    assert levels() == level


def test_steps_are_flat(t: nn.Module) -> None:
    steps_are_flat(t, t, 30)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_a_thousand_steps_are_flat(t: nn.Module, backend: str | None) -> None:
    steps_are_flat(t, torch.compile(t, backend=backend) if backend else t, 1000)


def test_what_is_dropped_gives_its_room_back(t: nn.Module, want: Step) -> None:
    """A forward whose backward never comes, and a transformed model that goes."""
    step(t)
    _, batch = model_and_batch()
    loss = t(**batch)
    assert levels_of(t)["disk"] == 3 * 600 * WIDE * 4
    gc.disable()  # at once, and not when garbage is collected some time
    try:
        del loss
        settle(lambda: levels_of(t)["disk"] == 0)
    finally:
        gc.enable()


def test_a_model_that_goes_takes_files_and_threads_with_it(tmp_path: Path) -> None:
    gc.collect()
    files, threads = open_files(), threading.active_count()
    model, _ = model_and_batch()
    t = on_disk(model, tmp_path)
    step(t)
    assert open_files() == files + 1 and threading.active_count() == threads + 2
    del t, model
    torch._dynamo.reset()
    gc.collect()
    settle(lambda: (open_files(), threading.active_count()) == (files, threads))


def settle(done: Callable[[], bool], what: str = "") -> None:
    end = time.monotonic() + 5
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    assert done(), what


def test_a_copy_of_a_model_and_a_pickled_one_carry_no_transfers(t: nn.Module, want: Step, tmp_path: Path) -> None:
    import copy
    import pickle

    _, batch = model_and_batch()
    loss = t(**batch)  # transfers are under way
    for made in (copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
        assert not type(made)._fxckpt_state.store._disks
        assert not differences(step(made).values(), want.values())
    torch.save(t.state_dict(), tmp_path / "saved.pt")
    loss.backward()


# ---- faults -------------------------------------------------------------------------------------------------------


class Faulty:
    """In place of a system call: works until the `number`-th call, which `what` replaces."""

    def __init__(self, real: Callable[..., int], what: Callable[..., int], number: int = 2) -> None:
        self.real, self.what, self.number, self.calls = real, what, number, 0

    def __call__(self, *args: Any) -> int:
        self.calls += 1
        return (self.what if self.calls == self.number else self.real)(*args)


def fails(code: int) -> Callable[..., int]:
    def call(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    return call


def nothing(*args: Any) -> int:
    return 0


OFFLOAD = r"offload of blocks_2_input \(region blocks\.2\), 153600 bytes, failed: "
RELOAD = r"reload of blocks_2_input \(region blocks\.2\), 153600 bytes, failed: "
FAULTS = {
    "disk full": ("pwrite", fails(errno.ENOSPC), f"{OFFLOAD}.*No space"),
    "write error": ("pwrite", fails(errno.EIO), f"{OFFLOAD}.*Input/out"),
    "nothing written": ("pwrite", nothing, f"{OFFLOAD}.*were not moved"),
    "read error": (
        "preadv",
        fails(errno.EIO),
        f"{RELOAD}.*Input/output",
    ),
    "nothing read": ("preadv", nothing, f"{RELOAD}.*were not moved"),
}


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_and_the_next_step_works(
    t: nn.Module, want: Step, monkeypatch: pytest.MonkeyPatch, fault: str, backend: str | None
) -> None:
    run = torch.compile(t, backend=backend) if backend else t
    reference = step(t, run)
    call, what, message = FAULTS[fault]
    with monkeypatch.context() as patch:
        patch.setattr(spill.os, call, Faulty(getattr(os, call), what))
        with pytest.raises(fxckpt.TransferError, match=message) as info:
            step(t, run)
    assert isinstance(info.value.__cause__, OSError)
    del info
    assert not differences(step(t, run).values(), reference.values())
    steps_are_flat(t, run, 3)


def test_a_short_write_goes_on_where_it_stopped(t: nn.Module, want: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Faulty(os.pwrite, lambda fd, memory, offset: pwrite(fd, memory[:BLOCK], offset))
    pwrite = os.pwrite
    monkeypatch.setattr(spill.os, "pwrite", short)
    assert not differences(step(t).values(), want.values())
    assert short.calls == 4


def test_a_short_read_goes_on_where_it_stopped(t: nn.Module, want: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    short = Faulty(os.preadv, lambda fd, parts, offset: preadv(fd, [parts[0][:BLOCK]], offset))
    monkeypatch.setattr(spill.os, "preadv", short)
    assert not differences(step(t).values(), want.values())
    assert short.calls == 4


def test_what_comes_back_changed_is_told(t: nn.Module, want: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``verify=True``."""
    preadv = os.preadv

    def changed(fd: int, parts: list[memoryview], offset: int) -> int:
        done = preadv(fd, parts, offset)
        parts[0][17] ^= 4
        return done

    with monkeypatch.context() as patch:
        patch.setattr(spill.os, "preadv", Faulty(preadv, changed))
        with pytest.raises(fxckpt.TransferError, match=r"reload of blocks_2_input .*checksum"):
            step(t)
    assert not differences(step(t).values(), want.values())


def test_a_file_system_that_does_not_mean_direct_access(
    t: nn.Module, want: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill.os, "pwrite", Faulty(os.pwrite, fails(errno.EINVAL), number=1))
    assert not differences(step(t).values(), want.values())
    assert not disk_of(t)._file._direct
    assert not differences(step(t).values(), want.values())


def test_no_room_is_told_before_a_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_and_batch()
    t = on_disk(model, tmp_path)
    monkeypatch.setattr(spill.os, "posix_fallocate", fails(errno.ENOSPC))
    started: list[bool] = []
    model.blocks[0].register_forward_hook(lambda *_: started.append(not torch.compiler.is_compiling()))
    with pytest.raises(fxckpt.TransferError, match=r"cannot take the 460800 bytes that a step offloads: .*No space"):
        t(**batch)
    assert not any(started)
    monkeypatch.undo()
    t(**batch).backward()


def test_no_room_for_a_larger_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code that takes any size asks for room only when it runs."""
    model, _ = stack()
    t = on_disk(model, tmp_path)
    run = torch.compile(t, backend="aot_eager", dynamic=True)
    run(x=torch.randn(300, 8)).backward()
    with monkeypatch.context() as patch:
        patch.setattr(spill.os, "posix_fallocate", fails(errno.ENOSPC))
        with pytest.raises(fxckpt.TransferError, match=r"offload of blocks_1_input .*192000 bytes.*No space left"):
            run(x=torch.randn(6000, 8))
    run(x=torch.randn(6000, 8)).backward()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell started the process in the background, to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_interrupt_while_waiting(t: nn.Module, want: Step, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    step(t)
    call = "pwrite" if place == "forward" else "preadv"

    def interrupted(*args: Any) -> int:
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C, while the main thread waits for this
        time.sleep(0.2)
        return int(getattr(REAL, call)(*args))

    with monkeypatch.context() as patch:
        patch.setattr(spill.os, call, Faulty(getattr(os, call), interrupted))
        with pytest.raises(KeyboardInterrupt):
            step(t)
    assert not differences(step(t).values(), want.values())
    steps_are_flat(t, t, 3)


def test_an_interrupt_at_any_place(t: nn.Module, want: Step) -> None:
    """As Ctrl-C wherever Python looks for one while the training thread runs the runtime: at calls' begin and end."""
    folder = os.path.dirname(store.__file__)

    def interrupted_step(number: int) -> int:
        """Raise at place `number`, counted from 1; how many places were passed."""
        places = 0

        def profile(frame: FrameType, event: str, arg: object) -> None:
            nonlocal places
            if event in ("call", "c_return") and frame.f_code.co_filename.startswith(folder):
                places += 1
                if places == number:
                    raise KeyboardInterrupt

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            step(t)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(before)
        return places

    step(t)
    size = disk_of(t)._file.size
    for number in range(1, interrupted_step(0) + 1):
        assert interrupted_step(number) == number
        settle(lambda: levels_of(t)["disk"] == levels_of(t)["in_flight"] == 0, f"place {number}")
    assert not differences(step(t).values(), want.values())
    assert disk_of(t)._file.size == size
    steps_are_flat(t, t, 3)


class REAL:
    pwrite, preadv = staticmethod(os.pwrite), staticmethod(os.preadv)


class Boom(Exception):
    pass


def test_an_exception_in_a_kernel_while_copies_are_under_way(
    t: nn.Module, want: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(t)
    real, calls = Like.empty, []

    def broken(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise Boom  # as any operator of the backward might
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Like, "empty", broken)
        with pytest.raises(Boom):
            step(t)
    calls.clear()
    assert not differences(step(t).values(), want.values())
    steps_are_flat(t, t, 3)


def test_threads_train_side_by_side(tmp_path: Path, want: Step) -> None:
    """Two models, each in its own thread; Dynamo's compilation is one at a time."""
    made = []
    for _ in range(2):
        model, batch = model_and_batch()
        t = on_disk(model, tmp_path)
        step(t)
        model.zero_grad()
        made.append((model, t, batch))
    results: list[Future[None]] = []

    def train(t: nn.Module, batch: Batch, result: Future[None]) -> None:
        try:
            for _ in range(20):
                t(**batch).backward()
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)

    for _, t, batch in made:
        results.append(Future())
        threading.Thread(target=train, args=(t, batch, results[-1])).start()
    for result in results:
        result.result(60)
    for model, t, _ in made:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, 20 * want.grads[name])
        assert fxckpt.stats(t).disk_bytes == 3 * 600 * WIDE * 4


# ---- processes ----------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, torch
from tests.test_disk import model_and_batch, on_disk, step
from pathlib import Path
from types import FrameType
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
folder = Path(sys.argv[1])
model, batch = model_and_batch()
reference = step(model)
t = on_disk(model, folder)
step(t)
"""


def process(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    root = Path(__file__).resolve().parent.parent
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, cwd=root, env=env
    )


def test_a_forked_child_has_its_own_file(tmp_path: Path) -> None:
    """As a DataLoader's worker: it may end, drop what it inherited, or train, and the parent's step goes on."""
    done = process(
        tmp_path,
        """
        from tests.helpers import differences
        loss = t(**batch)
        child = os.fork()
        if child == 0:
            try:
                mine = step(t)
                assert not differences(mine.values(), reference.values())
                try:
                    loss.backward()
                except Exception as error:
                    assert "forked" in str(error), error
                else:
                    raise AssertionError("the parent's transfers are not the child's")
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        model.zero_grad()
        loss.backward()
        from tests.helpers import grads
        assert not differences(grads(model), reference.grads)
        print("done")
        """,
    )
    assert done.stdout.strip() == "done", done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), 9)", "raise ValueError"])
def test_a_process_that_ends_leaves_nothing(tmp_path: Path, end: str) -> None:
    done = process(tmp_path, f"loss = t(**batch)\nprint('under way', flush=True)\n{end}\n")
    assert "under way" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr or "ValueError" in done.stderr
    assert "Exception ignored" not in done.stderr
    assert not list(tmp_path.iterdir())


# ---- the file -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["unnamed", "unlinked"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpillFile]:
    if request.param == "unlinked":  # a file system that cannot make a file without a name
        real = os.open
        unsupported = fails(errno.EOPNOTSUPP)
        monkeypatch.setattr(spill.os, "open", lambda *a: (unsupported if a[1] & os.O_TMPFILE else real)(*a))
    made = SpillFile(str(tmp_path))
    monkeypatch.undo()
    yield made
    made.close()


def test_nobody_else_can_open_the_file(file: SpillFile, tmp_path: Path) -> None:
    found = os.fstat(file._fd)
    assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_nlink == 0
    assert not list(tmp_path.iterdir())


def test_room_is_used_again(file: SpillFile) -> None:
    a, b, c = (file.take(n) for n in (BLOCK, 3 * BLOCK - 5, BLOCK))
    assert (a.offset, b.offset, c.offset, file.size) == (0, BLOCK, 4 * BLOCK, 5 * BLOCK)
    del b
    d, e = file.take(1), file.take(2 * BLOCK)
    assert (d.offset, e.offset, file.size) == (BLOCK, 2 * BLOCK, 5 * BLOCK)
    del a, c, d, e
    file.reserve(5 * BLOCK)
    assert file._free() == [(0, 5 * BLOCK)] and file.size == 5 * BLOCK
    f = file.take(7 * BLOCK)
    assert f.offset == 0 and file.size == 7 * BLOCK, "what is free at the end is grown"
    del f
    file.reserve(9 * BLOCK)
    assert file.size == 9 * BLOCK and file.take(0).offset == 0


def test_what_is_written_is_read(file: SpillFile) -> None:
    staging = Staging(4 * BLOCK)
    staging.memory[:] = bytes(range(256)) * (4 * BLOCK // 256)
    piece = file.take(3 * BLOCK)
    file.write(piece.offset, staging.blocks(2 * BLOCK + 7))
    staging.memory[:] = bytes(4 * BLOCK)
    file.read(piece.offset, staging.blocks(2 * BLOCK + 7))
    assert bytes(staging.memory[: 3 * BLOCK]) == bytes(range(256)) * (3 * BLOCK // 256)


def test_past_the_page_cache(file: SpillFile) -> None:
    """What was written does not stay in memory."""
    staging = Staging(1 << 20)
    piece = file.take(64 << 20)
    before = cached_bytes()
    for at in range(0, 64 << 20, 1 << 20):
        file.write(piece.offset + at, staging.blocks(1 << 20))
    assert cached_bytes() - before < 32 << 20


def cached_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Cached:")) * 1024


# ---- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"to": "moon"}, 'must be "cpu" or "disk"'),
        ({"to": "cpu", "dir": "."}, 'for to="disk" only'),
        ({"max_in_flight": 0}, "max_in_flight=0: it must be a whole number of at least 1"),
        ({"max_in_flight": 1.5}, "max_in_flight=1.5"),
        ({"prefetch": -1}, "prefetch=-1: it must be a whole number of at least 0"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fxckpt.SettingsError, match=message):
        fxckpt.Offload(**settings)


def test_settings_as_a_dict(tmp_path: Path, want: Step) -> None:
    """As ``TrainingArguments(gradient_checkpointing_kwargs=...)`` can hold them."""
    given = {"to": "disk", "dir": str(tmp_path), "prefetch": 2}
    t = fxckpt.transform(model_and_batch()[0], layers=Residual, offload=given)
    assert type(t)._fxckpt_state.settings.offload == fxckpt.Offload(to="disk", dir=str(tmp_path), prefetch=2)
    assert not differences(step(t).values(), want.values())
    with pytest.raises(fxckpt.SettingsError, match="unknown folder; its options are to, dir, max_in_flight, prefetch"):
        fxckpt.transform(model_and_batch()[0], layers=Residual, offload={"folder": "x"})


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(fxckpt.SettingsError, match="there is no such folder"):
        on_disk(model_and_batch()[0], tmp_path / "missing")


def test_a_folder_in_memory_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not in_memory("/dev/shm"):
        pytest.skip("no tmpfs on this machine")
    assert not in_memory("/proc") and not in_memory("/missing/folder")
    with caplog.at_level("WARNING", log.name):
        on_disk(model_and_batch()[0], Path("/dev/shm"))
    assert "lies in memory" in caplog.text
