"""The package as people and tools meet it: help for every name, exceptions, types."""

import ast
import inspect
import os
import pathlib
import pkgutil
import re
import runpy
import subprocess
import sys
import weakref

import pytest

import warpipe

HERE = pathlib.Path(warpipe.__file__).parent


def public_names():
    """Every public class, function, method and property, with its path."""
    for name in warpipe.__all__:
        thing = getattr(warpipe, name)
        if not (inspect.isclass(thing) or callable(thing)):
            continue
        yield name, thing
        if inspect.isclass(thing) and not issubclass(thing, BaseException):
            for member in sorted({key for base in thing.__mro__[:-1] for key in vars(base)}):
                if not member.startswith("_"):
                    yield f"{name}.{member}", inspect.getattr_static(thing, member)


def test_every_public_name_has_help():
    names = dict(public_names())
    assert len(names) > 80
    bare = [name for name, thing in names.items() if not (inspect.getdoc(thing) or "").strip()]
    assert bare == []


def test_help_renders():
    import pydoc

    text = pydoc.plain(pydoc.render_doc(warpipe))
    for word in ("camera/front", "wait_for_subscribers", "receive_async", "SampleLostError"):
        assert word in text or word in pydoc.plain(pydoc.render_doc(warpipe.Subscriber) + pydoc.render_doc(warpipe.Publisher))


def test_every_exported_name_is_there_once():
    assert len(set(warpipe.__all__)) == len(warpipe.__all__)
    assert all(hasattr(warpipe, name) for name in warpipe.__all__)


def test_every_exception_is_an_error_of_warpipe_with_a_message_of_its_own():
    errors = [getattr(warpipe, name) for name in warpipe.__all__ if name.endswith("Error")]
    assert len(errors) > 30
    for error in errors:
        assert issubclass(error, warpipe.Error) and error.__module__ == "warpipe"
        assert str(error("said")) == "said"


@pytest.mark.parametrize(
    "ours, theirs",
    [("TimeoutError", TimeoutError), ("ConnectionError", ConnectionError), ("SampleLostError", ConnectionError), ("AccessDeniedError", PermissionError),
     ("NotFoundError", ConnectionRefusedError), ("PeerGoneError", ConnectionResetError), ("EventLostError", ConnectionError),
     ("TicketExpiredError", ConnectionError), ("HandleError", ValueError),
     ("NotExportableError", BufferError), ("DeadlinePassedError", TimeoutError),
     ("ArgumentError", ValueError), ("LayoutError", ValueError), ("DTypeError", TypeError), ("MemoryLimitError", MemoryError),
     ("QuotaExceededError", MemoryError),
     ("DeviceMemoryError", MemoryError), ("ExportError", BufferError), ("SystemCallError", OSError)],
)
def test_exceptions_are_where_python_expects_them(ours, theirs):
    assert issubclass(getattr(warpipe, ours), theirs)


def test_every_class_that_is_closed_has_the_base_of_them_all():
    classes = [thing for _, thing in public_names() if inspect.isclass(thing)]
    closed = {thing for thing in classes if hasattr(thing, "closed")}
    assert {warpipe.Publisher, warpipe.Worker, warpipe.Event, warpipe.Published} < closed
    assert [thing for thing in closed if not issubclass(thing, warpipe.Closeable)] == []
    with pytest.raises(TypeError):
        warpipe.Closeable()


def test_a_with_block_ends_with_the_close_of_the_class(domain):
    class Logging(warpipe.Subscriber):
        calls = 0

        def close(self):
            self.calls += 1
            super().close()

    with warpipe.Publisher("logged", domain=domain, device="host") as publisher:
        with Logging("logged", domain=domain, device="host") as subscriber:
            assert isinstance(subscriber, warpipe.Closeable) and weakref.ref(subscriber)() is subscriber
            assert not subscriber.closed
        assert subscriber.closed and subscriber.calls == 1
        assert not publisher.closed
    assert publisher.closed


def test_importing_brings_no_framework():
    code = "import warpipe, sys; print([m for m in ('numpy', 'torch', 'cupy', 'jax', 'numba') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_package_says_that_it_is_typed():
    files = {path.name for path in HERE.iterdir()}
    assert {"py.typed", "_warpipe.pyi"} <= files
    assert {module.name for module in pkgutil.iter_modules([str(HERE)])} >= {"_errors", "_receivers"}


def test_mypy_is_content_with_the_package_and_its_users(tmp_path):
    pytest.importorskip("mypy")
    if REPOSITORY is None:
        pytest.skip("the settings of mypy are not here")
    settings = REPOSITORY / "crates/warpipe-python/pyproject.toml"
    user = tmp_path / "user.py"
    user.write_text(
        "import asyncio, concurrent.futures\n"
        "import warpipe\n"
        "def use(p: warpipe.Publisher, s: warpipe.Subscriber) -> int:\n"
        "    with p.loan((2, 3), 'float32') as out:\n"
        "        out[:] = 1\n"
        "    for frame in s:\n"
        "        with frame:\n"
        "            return frame.sequence + frame.shape[0] + len(frame.metadata)\n"
        "    return s.receive(timeout=None).nbytes\n"
        "async def wait(s: warpipe.Subscriber) -> str:\n"
        "    async for frame in s:\n"
        "        return frame.dtype\n"
        "    raise warpipe.TimeoutError('late')\n"
        "def work(q: warpipe.Queue, w: warpipe.Worker, s: warpipe.Server) -> list[int]:\n"
        "    for lease in w:\n"
        "        with lease, lease.output(lease.shape, lease.dtype) as out:\n"
        "            out.copy_from(lease)\n"
        "    for request in s:\n"
        "        request.complete(b'', metadata={'by': request.queue_pid})\n"
        "    return [result.job for result in q.results(timeout=1)] + [q.submit(b'').result(1.0).attempt]\n"
        "async def serve(w: warpipe.Worker, s: warpipe.Server, m: warpipe.Members) -> int:\n"
        "    async with s:\n"
        "        async for request in s:\n"
        "            request.complete()\n"
        "    async for lease in w:\n"
        "        lease.complete()\n"
        "    async for change in m:\n"
        "        return change.member.pid + (await s.accept_async(timeout=None)).queue_pid\n"
        "    latest = await m.changes_async(1.0)\n"
        "    return latest.member.pid if latest else (await w.lease_async()).job\n"
        "async def ask(q: warpipe.Queue, c: warpipe.Client) -> str:\n"
        "    async for result in q.results():\n"
        "        return result.dtype\n"
        "    (handle,) = concurrent.futures.wait([q.submit(b'')]).done\n"
        "    (await asyncio.wrap_future(q.submit(b''))).release()\n"
        "    return handle.result().dtype + (await q.submit(b'')).dtype + (await c.request(b'', timeout=2)).dtype\n"
        "def faces(p: warpipe.Publisher, t: warpipe.Timeline, s: warpipe.Semaphore, m: warpipe.Members) -> int:\n"
        "    memory = warpipe.Memory.allocate(64)\n"
        "    memory.view((2, 2), 'float32').copy_from([1])\n"
        "    ticket: warpipe.Ticket = memory.publish('w', writable=True).ticket(0, 8)\n"
        "    view: warpipe.View = ticket.open(wait=None).range(0, 4)\n"
        "    with s.acquire(stream=warpipe.Stream(), timeout=1.0) as permit:\n"
        "        t.signal(1, stream=warpipe.Stream())\n"
        "    for change in m:\n"
        "        if change.what == 'died':\n"
        "            return len(change.member.endpoints) + permit.passed\n"
        "    return p.send(view, zero_copy='require') + warpipe.Event.create().handle().open().query()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={settings}", "--no-incremental", "-m", "user", "-p", "warpipe"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stubs_say_what_the_native_half_is(tmp_path):
    pytest.importorskip("mypy")
    allowed = tmp_path / "allowed"
    # Python 3.11 has no name for the buffer protocol, and its type checkers need one.
    allowed.write_text("warpipe._warpipe._Tensor.__(release_)?buffer__\n" if sys.version_info < (3, 12) else "")
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "warpipe._warpipe", "--ignore-missing-stub", "--allowlist", str(allowed)],
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def repository():
    """The checkout that this file is in; None where only the tests were carried to."""
    folders = pathlib.Path(__file__).resolve().parents
    return next((folder for folder in folders if (folder / "crates/warpipe/src/lib.rs").exists()), None)


REPOSITORY = repository()


@pytest.mark.skipif(REPOSITORY is None, reason="the repository is not here")
def test_the_stubs_have_the_docstrings_of_the_native_half():
    generate = REPOSITORY / "crates/warpipe-python/stubs/generate.py"
    space = runpy.run_path(str(generate))
    assert space["STUB"].read_text() == space["stub"](), "run cargo xtask python --stubs"


@pytest.mark.skipif(REPOSITORY is None, reason="the repository is not here")
def test_an_editor_shows_the_text_of_every_public_class_and_method():
    stub = ast.parse((HERE / "_warpipe.pyi").read_text())
    texts = {
        (one.name, *([member.name] if member else []))
        for one in stub.body
        if isinstance(one, ast.ClassDef)
        for member in [None, *(member for member in one.body if isinstance(member, ast.FunctionDef))]
        if ast.get_docstring(member or one)
    }
    for name, thing in public_names():
        # A class is documented where it is, and a member where it is defined.
        owner, _, member = name.partition(".")
        if isinstance(thing, int) or inspect.isfunction(getattr(warpipe, owner)):
            continue
        bases = [base for base in getattr(warpipe, owner).__mro__ if base.__module__ == "warpipe"]
        names = {base.__name__ for base in bases if not member or member in vars(base)}
        if any(hasattr(warpipe._warpipe, name) and not issubclass(getattr(warpipe, owner), tuple) for name in names):
            assert any((base, *([member] if member else [])) in texts for base in names), name


def rust_names():
    """What the Rust library exports, by its `lib.rs`."""
    text = (REPOSITORY / "crates/warpipe/src/lib.rs").read_text()
    # Models, which a build with a model checker alone has.
    text = re.sub(r"^#\[cfg\(loom\)\]\n(?:#.*\n)*.*\n", "", text, flags=re.MULTILINE)
    modules = re.findall(r"^pub mod (\w+);", text, re.MULTILINE)
    uses = re.findall(r"^pub use [\w:]*?(?:::\{([^}]*)\}|::(\w+));", text, re.MULTILINE)
    return set(modules) | {name.strip() for many, one in uses for name in (many or one).split(",") if name.strip()}


# Names of the Rust library that neither the package nor its guide has, each with the reason.
WITHOUT_COUNTERPART = {
    "DeviceSlice": "what Memory, SharedMemory, Buffer and LentBuffer have in common",
    "Language": "the messages are in the words of Python",
    "PeerCredentials": "of `policy_of`, which would run Python where subscribers are accepted",
    **dict.fromkeys(["Kernel", "KernelLaunch", "HostKernel"], "kernels are the frameworks'"),
    "AllocationStats": "in warpipe.torch",
    **dict.fromkeys(["LegacyInfo", "PublisherInfo", "PublisherStats", "RingInfo", "SampleInfo", "SemaphoreState", "TicketInfo"], "attributes of the object"),
    **dict.fromkeys(["Returned", "Unanswered"], "what comes back from a call that failed"),
    **dict.fromkeys(["lay_out_parts", "new_generation"], "for the bridge"),
    "PerProcess": "for the C interface",
    **dict.fromkeys(["PARTS_MAX", "PART_NAME_BYTES_MAX"], "limits that the messages say"),
    **dict.fromkeys(
        ["DeviceFault", "HandleFault", "HandshakeFault", "Expiry", "Holder", "JobEnd", "PeerLimit",
         "PointerKind", "LimitFault", "Loss", "NameFault", "StateFault", "WeightsFault", "WeightsFileFault",
         "WeightsDifference"],
        "the exception's message and attributes",
    ),
    **dict.fromkeys(
        ["backend", "interop_cudarc", "fuzzing", "ProcessStats", "process_stats"],
        "seams and figures for tests",
    ),
}


@pytest.mark.skipif(REPOSITORY is None, reason="the repository is not here")
def test_every_name_of_the_rust_library_has_its_counterpart_or_a_reason():
    names = rust_names()
    assert len(names) > 70 and {"Publisher", "NAME_BYTES_MAX", "clock"} <= names
    guide = (REPOSITORY / "docs/guide/python.md").read_text()
    others = guide[guide.index("## Names"):]
    told = set(re.findall(r"`(\w+)`", others))
    # Options are keyword arguments here.
    lacking = {name for name in names - set(warpipe.__all__) - told if not name.endswith("Options")}
    assert lacking == set(WITHOUT_COUNTERPART)


def signatures():
    """The signature of every public class and method, with its path."""
    for name, thing in public_names():
        thing = thing.__func__ if isinstance(thing, (staticmethod, classmethod)) else thing
        if isinstance(thing, type) and not issubclass(thing, BaseException) or callable(thing) and not isinstance(thing, type):
            try:
                yield name, inspect.signature(thing)
            except ValueError:
                # Of a class that its program cannot make.
                assert isinstance(thing, type), name


def test_every_stream_argument_is_keyword_only():
    streams = {name: sign.parameters["stream"] for name, sign in signatures() if "stream" in sign.parameters}
    assert {"Semaphore.acquire", "Event.record", "Publisher.send", "Subscriber", "Timeline.wait"} <= set(streams)
    assert len(streams) > 20
    by_place = [name for name, stream in streams.items() if stream.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert by_place == []


def test_a_number_is_no_stream_by_its_place(tmp_path):
    semaphore = warpipe.Semaphore.create("s", domain=tmp_path / "domain", device="host")
    with semaphore.acquire(5.0) as permit:
        assert not permit.released
        with pytest.raises(warpipe.TimeoutError):
            semaphore.acquire(0.01)
    event = warpipe.Event.create(domain=tmp_path / "domain", device="host")
    with pytest.raises(TypeError, match="positional"):
        event.wait(5)
    semaphore.close()
    event.close()


def test_results_of_several_values_have_names(domain, open_publisher, open_queue):
    publisher = open_publisher(memory_limit=1 << 24)
    queue = open_queue()
    assert publisher.memory_in_use == warpipe.MemoryUse(0, 1 << 24)
    used, limit = queue.memory_in_use
    assert (used, limit) == (queue.memory_in_use.allocated_nbytes, queue.memory_in_use.limit_nbytes)
    first, second = domain.endpoints()
    assert (first.name, first.alive, first.pid, first.foreign) == ("a", True, os.getpid(), None) == tuple(first)
    assert repr(second) == f"EndpointInfo(name='jobs', alive=True, pid={os.getpid()}, foreign=None)"


def test_what_stands_in_the_place_of_an_endpoint_is_told(domain, open_publisher):
    open_publisher()
    (pathlib.Path(domain.path) / "b.lock").symlink_to("/dev/null")
    assert [(one.name, one.alive, one.foreign) for one in domain.endpoints()] == [("a", True, None), ("b", False, "a symlink")]


def test_no_public_result_is_a_bare_tuple():
    """Except the dimensions of a tensor, and where another protocol says so."""
    bare = re.compile(r"def (\w+)\(.*\) -> .*\btuple\[(?!int, \.\.\.\])")
    names = {name for name in bare.findall((HERE / "_warpipe.pyi").read_text())}
    assert names <= {"__cuda_stream__", "__dlpack_device__", "__reduce__", "items"}
