"""Memory of GPUs, on one or over a driver that stands in for one."""

import ctypes

import pytest

pytest.importorskip("package", exc_type=ImportError, reason="declared skip: no nixl-cu12 or nixl-cu13 (pip)")

from agents import MANY, Memory, Process, finish, transfer  # noqa: E402
from package import nixlBackendError, nixlRemoteDisconnectError  # noqa: E402

# The unit of the driver's allocations.
ALLOCATION = 2 << 20

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


def test_memory_of_several_allocations_is_written_and_read_across_their_borders(agent):
    """As PyTorch's expandable segments are; the pieces do not end where the allocations do."""
    many = 3 * ALLOCATION
    with Process("target", many, pieces=64, gpu=0, allocations=3) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, many, pieces=64, value=5, gpu=0, allocations=3)
        assert transfer(agent, "WRITE", local, target.tuples, name, kind="VRAM") == "DONE"
        assert target.ask("values") == [5]
        target.ask("fill", 9)
        assert transfer(agent, "READ", local, target.tuples, name, kind="VRAM") == "DONE"
        assert local.values() == [9]


@pytest.mark.parametrize("allocations", [0, 1])
def test_deregistered_memory_of_a_gpu_is_not_mapped_later(agent, allocations):
    with Process("target", ALLOCATION, gpu=0, allocations=allocations) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, ALLOCATION, gpu=0)
        target.ask("deregister")
        remote = agent.get_xfer_descs(target.tuples, "VRAM")
        with pytest.raises(nixlBackendError):
            agent.initialize_xfer("WRITE", local.descriptors(), remote, name)


def test_memory_that_was_registered_anew_is_reached_by_its_new_metadata(agent):
    with Process("target", ALLOCATION, value=3, gpu=0, allocations=1) as target:
        local = Memory(agent, ALLOCATION, gpu=0)
        for value in (3, 4):
            name = agent.add_remote_agent(target.ask("metadata"))
            assert transfer(agent, "READ", local, target.tuples, name, kind="VRAM") == "DONE"
            assert local.values() == [value]
            agent.remove_remote_agent(name)
            target.ask("register anew")
            target.ask("fill", 4)


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
