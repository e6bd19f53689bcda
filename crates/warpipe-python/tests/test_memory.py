"""Memory beside the channel: allocated, published, lent, exported; each of it an array of any framework."""

import gc
import os
import pickle

import numpy as np
import pytest
from conftest import until
from peers import open_memory, process, said
from test_processes import place  # noqa: F401

import warpipe
from warpipe import _warpipe


@pytest.fixture
def allocate(device):
    return lambda nbytes=4096: warpipe.Memory.allocate(nbytes, device=device)


def as_numpy(view):
    return np.frombuffer(view.tobytes(), view.dtype).reshape(view.shape)


def test_memory_is_a_tensor_of_every_shape_that_fits(allocate, device):
    memory = allocate()
    assert (memory.shape, memory.dtype, memory.nbytes, memory.read_only) == ((4096,), "uint8", 4096, False)
    assert memory.tobytes() == bytes(4096)
    matrix = memory.view((4, 8), "float32", offset=512)
    assert (matrix.shape, matrix.dtype, matrix.strides, matrix.nbytes) == ((4, 8), "float32", (8, 1), 128)
    assert matrix.ptr == memory.ptr + 512 and matrix.device == device
    wanted = np.arange(32, dtype=np.float32).reshape(4, 8)
    matrix.copy_from(wanted)
    assert (as_numpy(matrix) == wanted).all()
    assert memory.tobytes()[512:640] == wanted.tobytes()
    memory.write(b"abcd", 4092)
    assert memory.tobytes()[4092:] == b"abcd"
    for data in (bytearray(b"efgh"), memoryview(b"e.f.g.h.")[::2], np.frombuffer(b"efgh", np.uint16).reshape(2, 1)):
        memory.write(bytes(4), 4092)
        memory.write(data, 4092)
        assert memory.tobytes()[4092:] == b"efgh"
    with pytest.raises(TypeError):
        memory.write("text")
    assert isinstance(memory, warpipe.View) and "Memory(" in repr(memory)


def test_a_tensor_goes_through_memory_by_every_protocol(allocate, device):
    memory = allocate()
    view = memory.view((2, 3), "int64")
    view.copy_from(np.arange(6).reshape(2, 3))
    assert view.__dlpack_device__() == ((1, 0) if device.kind == "host" else (2, device.ordinal))
    other = allocate().view((2, 3), "int64")
    other.copy_from(view)
    assert as_numpy(other).tolist() == [[0, 1, 2], [3, 4, 5]]
    if device.kind == "host":
        for array in (np.from_dlpack(view), np.asarray(view), view.numpy()):
            assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
            array[0, 0] = 9
            assert view.tobytes()[:1] == b"\x09"
            array[0, 0] = 0
        with pytest.raises(AttributeError):
            view.__cuda_array_interface__
    else:
        assert view.__cuda_array_interface__["data"] == (view.ptr, False)


def test_what_does_not_fit_is_refused(allocate):
    memory = allocate()
    with pytest.raises(warpipe.ArgumentError, match=r"range is 0\.\.4100; allowed is 0\.\.4096 of"):
        memory.view(1025, "float32")
    with pytest.raises(warpipe.LayoutError):
        memory.view(4, "float32", offset=2)
    with pytest.raises(warpipe.LayoutError, match="does not fit"):
        memory.copy_from(np.zeros(3, np.uint8))
    with pytest.raises(warpipe.ArgumentError, match=r"range is 4093\.\.4097"):
        memory.write(b"1234", 4093)
    with pytest.raises(warpipe.ArgumentError):
        allocate(0)


def test_memory_stays_while_an_array_of_it_lives(allocate, device):
    memory = allocate()
    view = memory.view(4, "int32")
    memory.release()
    assert memory.released and device.bytes_held > 0
    with pytest.raises(warpipe.ReleasedError):
        memory.tobytes()
    memory.release()
    with view:
        held = view.numpy() if device.kind == "host" else None
    assert held is None or (device.bytes_held > 0 and held.tolist() == [0, 0, 0, 0])
    del held, view, memory
    gc.collect()
    until(lambda: device.bytes_held == 0, "the memory")


def test_work_of_streams_is_waited_for(allocate, device):
    stream = warpipe.Stream(device)
    with allocate() as memory:
        memory.write(b"x" * 4096, stream=stream)
        memory.used_on(stream=stream)
        memory.wait()
        assert stream.is_idle() and memory.tobytes() == b"x" * 4096


def test_bytes_that_come_without_a_stream_are_there_when_the_call_returns(allocate, domain, device):
    memory = allocate(1 << 20)
    with memory.publish("weights", domain=domain) as published:
        # Another hold on the same memory, which knows nothing of the first one's streams.
        other = published.ticket().open(device=device)
        for number in range(20):
            memory.write(bytes([number]) * (1 << 20))
            assert other.tobytes() == bytes([number]) * (1 << 20)
            memory.copy_from(np.full(1 << 20, 100 + number, np.uint8))
            assert other.tobytes() == bytes([100 + number]) * (1 << 20)


def test_a_read_waits_for_the_stream_that_writes_and_gives_up_in_time(allocate, device, domain):
    stream = warpipe.Stream(device)
    gate = warpipe.Timeline.create("gate", domain=domain, device=device)
    opened = warpipe.Timeline.open("gate", domain=domain, device=device)
    memory = allocate()
    opened.wait(1, stream=stream)
    memory.write(b"late", stream=stream)
    with pytest.raises(warpipe.TimeoutError):
        memory.wait(0.05)
    gate.signal(1)
    assert memory.tobytes()[:4] == b"late"


def test_a_ticket_goes_as_text_file_and_pickle(allocate, domain, device, tmp_path):
    memory = allocate()
    memory.view(4, "int32", 1024).copy_from(np.arange(4, dtype=np.int32))
    with memory.publish("weights", domain=domain) as published:
        ticket = published.ticket(1024, 16)
        assert (ticket.name, ticket.kind, ticket.nbytes, ticket.domain) == ("weights", "memory", 16, domain.path)
        ticket.write_file(tmp_path / "ticket")
        forms = [warpipe.Ticket(str(ticket)), pickle.loads(pickle.dumps(ticket)), warpipe.Ticket.read_file(tmp_path / "ticket")]
        assert all(form == ticket and hash(form) == hash(ticket) for form in forms)
        shared = forms[0].open(device=device)
        # In its own process it is the memory itself.
        assert isinstance(shared, warpipe.SharedMemory) and shared.name == "weights" and shared.owner == device.uuid
        assert as_numpy(shared.view(4, "int32")).tolist() == [0, 1, 2, 3]
        assert shared.range(4, 8).view(2, "int32").tobytes() == np.array([1, 2], np.int32).tobytes()
        assert warpipe.Ticket.to("weights", domain=domain).open(device=device).nbytes == 4096
        with pytest.raises(warpipe.NameTakenError):
            memory.publish("weights", domain=domain)
    with pytest.raises(warpipe.HandleError, match="a usable ticket"):
        warpipe.Ticket("warpipe-ticket:1:00")
    with pytest.raises(warpipe.NotFoundError):
        warpipe.Ticket.to("others", domain=domain).open(device=device)


def test_memory_that_was_released_is_still_told_in_words(allocate, domain):
    published = allocate(64).publish("memory", domain=domain)
    with published.ticket().open(device=published.memory.device) as opened:
        said = repr(opened)
    assert repr(opened) == said and said.startswith("SharedMemory(uint8[64]")
    published.close()


def test_a_ticket_whose_owner_has_closed_is_expired(allocate, domain, device):
    published = allocate().publish("weights", domain=domain)
    ticket = published.ticket()
    del published
    gc.collect()
    with pytest.raises(warpipe.TicketExpiredError):
        ticket.open(device=device)


def test_a_descriptor_and_what_is_known_of_it_are_memory(allocate, device):
    memory = allocate()
    memory.write(b"by descriptor")
    descriptor, info = memory.export_fd(), pickle.loads(pickle.dumps(memory.info))
    assert info == memory.info and info.nbytes == 4096 and info.device == device.uuid
    try:
        shared = warpipe.SharedMemory.import_fd(descriptor, info, device=device)
    finally:
        os.close(descriptor)
    assert shared.tobytes()[:13] == b"by descriptor"
    with pytest.raises(warpipe.ArgumentError):
        warpipe.SharedMemory.import_fd(-1, info, device=device)
    pipe = os.pipe()
    with pytest.raises(warpipe.DeviceError) as raised:
        warpipe.SharedMemory.import_fd(pipe[0], info, device=device)
    assert raised.value.fault == "NotShareable"
    [os.close(end) for end in pipe]


def test_a_block_is_lent_and_comes_back(domain, device):
    with warpipe.Pool.create("scratch", domain=domain, device=device, memory_limit=2 << 20) as pool:
        block = pool.allocate(1 << 20)
        block.view(4, "int32").copy_from(np.arange(4, dtype=np.int32))
        block.wait()
        with pytest.raises(warpipe.MemoryLimitError):
            pool.allocate(2 << 20, timeout=0.01)
        lent = warpipe.LentBuffer.open(block.lend(), device=device)
        assert (lent.name, lent.read_only) == ("scratch", True) and as_numpy(lent.view(4, "int32")).tolist() == [0, 1, 2, 3]
        client = warpipe.PoolClient.open("scratch", domain=domain, device=device)
        assert not client.is_owner_gone
        own = client.allocate(4096)
        assert not own.read_only and pool.stats.lent_nbytes >= 4096 and pool.stats.peers >= 1
        ticket = block.lend()
        lent.release()
        own.release()
        block.release(stream=warpipe.Stream(device))
        with pytest.raises(warpipe.TicketExpiredError):
            warpipe.LentBuffer.open(ticket, device=device)
        with pytest.raises(warpipe.OtherKindError):
            ticket.open(device=device)
        pool.allocate(2 << 20, timeout=10.0).release()
        client.close()


def test_a_pool_with_as_many_blocks_as_it_may_have_does_not_advise_a_larger_memory_limit(domain, device):
    with warpipe.Pool.create("scratch", memory_limit=1 << 30, domain=domain, device=device) as pool:
        blocks = [pool.allocate(16) for _ in range(8192)]
        with pytest.raises(warpipe.MemoryLimitError, match="release some: it has as many blocks"):
            pool.allocate(16, timeout=0)
        blocks.pop().release()
        blocks.append(pool.allocate(16, timeout=10))
        del blocks


def test_each_user_of_a_pool_has_its_quota(domain, device):
    own, tenant = os.geteuid(), os.geteuid() + 1
    on = {"domain": domain, "device": device}
    quotas = {own: warpipe.Quota(nbytes=2 << 20), tenant + 1: (0, None)}
    with warpipe.Pool.create("scratch", **on, user_quota=warpipe.Quota(blocks=1), quotas=quotas) as pool:
        client, block = warpipe.PoolClient.open("scratch", **on), pool.allocate(1 << 20)
        for ask in (pool.allocate, client.allocate):
            with pytest.raises(warpipe.QuotaExceededError) as over:
                ask((1 << 20) + 1, timeout=0.01)
            error = over.value
            assert (error.endpoint, error.uid, error.used, error.limit) == ("scratch", own, 1 << 20, 2 << 20)
            assert error.error_kind == "limit_reached" and error.nbytes == (1 << 20) + 1
        usage = pool.usage(own)
        assert (usage.nbytes, usage.blocks, usage.quota) == (1 << 20, 1, warpipe.Quota(2 << 20, None))
        theirs = pool.allocate(8, uid=tenant)
        assert pool.usage(tenant) == (512, 1, 2 << 20, (None, 1))
        with pytest.raises(warpipe.QuotaExceededError) as over:
            pool.allocate(8, uid=tenant)
        assert (over.value.uid, over.value.blocks, over.value.blocks_max) == (tenant, 1, 1)
        with pytest.raises(warpipe.QuotaExceededError):
            pool.allocate(8, timeout=None, uid=tenant + 1)
        with pytest.raises(warpipe.AccessDeniedError):
            warpipe.LentBuffer.open(theirs.lend(), device=device)
        theirs.release()
        pool.allocate(8, timeout=10.0, uid=tenant).release()
        block.release()
        client.close()


def test_endpoints_of_every_kind_admit_other_users_if_they_are_named(domain, device):
    on = {"domain": domain, "device": device}
    made = lambda **who: [  # noqa: E731
        warpipe.Timeline.create("t", **on, **who), warpipe.Semaphore.create("s", **on, **who), warpipe.Event.create(**on, **who),
        warpipe.Member.join("m", domain=domain, **who), warpipe.Pool.create("p", **on, **who)]
    for who, mode in (({}, 0o600), ({"allow_uids": [1]}, 0o666), ({"allow_gids": [1]}, 0o666)):
        endpoints = made(**who)
        sockets = [entry for entry in os.scandir(domain.path) if entry.name.endswith(".sock")]
        assert [entry.stat().st_mode & 0o777 for entry in sockets] == [mode] * 5
        [endpoint.close() for endpoint in endpoints]


def test_a_legacy_handle_names_what_another_allocator_made(device):
    plain = _warpipe._allocate_plain(4096, device)
    tensor = plain.view((2, 2), "int32", 512)
    tensor.copy_from(np.arange(4, dtype=np.int32).reshape(2, 2))
    handle = warpipe.LegacyHandle.export(tensor, device=device)
    assert (handle.nbytes, handle.offset, handle.allocation_nbytes, handle.pid) == (16, 512, 4096, os.getpid())
    for form in (str(handle), handle.to_bytes(), handle):
        assert warpipe.LegacyHandle(form) == handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    memory = handle.open(device=device)
    assert isinstance(memory, warpipe.LegacyMemory) and as_numpy(memory.view(4, "int32")).tolist() == [0, 1, 2, 3]
    with pytest.raises(warpipe.HandleError, match="a usable legacy handle"):
        warpipe.LegacyHandle(handle.to_bytes()[:-1])


def test_memory_that_no_legacy_handle_can_name_is_refused_by_name(allocate, device):
    with pytest.raises(warpipe.NotExportableError) as refused:
        warpipe.LegacyHandle.export(allocate(), device=device)
    assert refused.value.kind and refused.value.ptr


def test_another_process_opens_what_it_is_sent(domain, device, place, allocate):  # noqa: F811
    memory = allocate()
    numbers = np.arange(4, dtype=np.int32)
    plain = _warpipe._allocate_plain(64, device)
    pool = warpipe.Pool.create("scratch", domain=domain, device=device)
    block = pool.allocate(64)
    for view in (memory, plain, block):
        view.view(4, "int32").copy_from(numbers)
        view.wait()
    published = memory.publish("weights", domain=domain, writable=True)
    readable = memory.publish("readable", domain=domain)
    with process(open_memory, place[1]) as (_child, pipe):
        pipe.send(published.ticket())
        assert said(pipe) == ("SharedMemory", [0, 1, 2, 3], False)
        assert as_numpy(memory.view(4, "int32")).tolist() == [-1, -1, -1, -1]
        pipe.send(readable.ticket())
        assert said(pipe) == ("SharedMemory", [-1, -1, -1, -1], True)
        pipe.send(warpipe.LegacyHandle.export(plain, device=device))
        assert said(pipe) == ("LegacyMemory", [0, 1, 2, 3], False)
        assert as_numpy(plain.view(4, "int32")).tolist() == [-1, -1, -1, -1]
        pipe.send(block.lend())
        assert said(pipe) == ("LentBuffer", [0, 1, 2, 3], True)
        pipe.send(None)
    published.close()
    readable.close()
    pool.close()
