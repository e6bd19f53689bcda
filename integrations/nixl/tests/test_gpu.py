"""Memory of cudaMalloc, on a GPU or over a driver that stands in for one."""

import ctypes

import pytest

pytest.importorskip("nixl_cu12", reason="declared skip: no nixl-cu12 (pip install nixl-cu12)")

from agents import MANY, Memory, Process, finish, transfer  # noqa: E402
from nixl_cu12._bindings import nixlRemoteDisconnectError  # noqa: E402

try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    pytest.skip("declared skip: no libcuda.so.1", allow_module_level=True)


def test_a_peers_memory_of_a_gpu_is_written_and_read(agent):
    with Process("target", MANY, pieces=96, gpu=0) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, MANY, pieces=96, value=5, gpu=0)
        done = transfer(agent, "WRITE", local, target.tuples, name, b"written", "VRAM")
        assert done == "DONE"
        assert target.ask("notifications", 1) == [("initiator", b"written")]
        assert target.ask("values") == [5]
        target.ask("fill", 9)
        assert transfer(agent, "READ", local, target.tuples, name, kind="VRAM") == "DONE"
        assert local.values() == [9]


def test_an_agent_copies_its_own_memory_of_a_gpu(agent):
    ours, other = Memory(agent, 4096, value=7, gpu=0), Memory(agent, 4096, gpu=0)
    assert transfer(agent, "WRITE", ours, other.tuples(), "initiator", kind="VRAM") == "DONE"
    assert other.values() == [7]


def test_a_killed_peer_with_memory_of_a_gpu_leaves_its_survivor_usable(agent):
    local = Memory(agent, MANY, value=4, gpu=0)
    for _ in range(3):
        with Process("target", MANY, gpu=0) as target:
            name = agent.add_remote_agent(target.metadata)
            done = transfer(agent, "WRITE", local, target.tuples, name, kind="VRAM")
            assert done == "DONE"
            remote = agent.get_xfer_descs(target.tuples, "VRAM")
            handle = agent.initialize_xfer("WRITE", local.descriptors(), remote, name)
            target.process.kill()
            target.process.join()
            with pytest.raises(nixlRemoteDisconnectError):
                finish(agent, handle, agent.transfer(handle))
            agent.release_xfer_handle(handle)
            agent.remove_remote_agent(name)
