"""Host memory, with real agents."""

import os
import signal
import time

import pytest

pytest.importorskip("package", exc_type=ImportError, reason="declared skip: no nixl-cu12 or nixl-cu13 (pip)")

from agents import MANY, Memory, Process, finish, new_agent, notifications, transfer  # noqa: E402
from package import nixlBackendError, nixlRemoteDisconnectError  # noqa: E402


def test_a_write_and_a_read_of_another_process_bring_each_byte(agent):
    with Process("target", MANY, pieces=96) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, MANY, pieces=96, value=5)
        assert transfer(agent, "WRITE", local, target.tuples, name) == "DONE"
        assert target.ask("values") == [5]
        target.ask("fill", 9)
        assert transfer(agent, "READ", local, target.tuples, name) == "DONE"
        assert (local.array == 9).all()


def test_pieces_go_to_the_addresses_that_they_name(agent):
    with Process("target", 4096, pieces=4) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, 4096, pieces=4)
        local.array[:] = [at // 1024 for at in range(4096)]
        swapped = [target.tuples[at] for at in (3, 2, 1, 0)]
        assert transfer(agent, "WRITE", local, swapped, name) == "DONE"
        assert transfer(agent, "READ", local, target.tuples, name) == "DONE"
        assert local.array[::1024].tolist() == [3, 2, 1, 0]


def test_a_notification_comes_when_all_data_is_there(agent):
    with Process("target", MANY) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, MANY, value=1)
        for turn in range(5):
            local.array[:] = turn
            assert transfer(agent, "WRITE", local, target.tuples, name, b"here") == "DONE"
            assert target.ask("notifications", 1) == [("initiator", b"here")]
            assert target.ask("values") == [turn]


def test_notifications_keep_their_order_both_ways(agent):
    with Process("target") as target:
        name = agent.add_remote_agent(target.metadata)
        target.ask("meet", agent.get_agent_metadata())
        for number in range(200):
            agent.send_notif(name, str(number).encode())
        expected = [("initiator", str(number).encode()) for number in range(200)]
        assert target.ask("notifications", 200) == expected
        target.ask("notify", "initiator", b"")
        assert notifications(agent, 1) == [(name.decode(), b"")]


def test_a_handle_may_be_posted_again(agent):
    with Process("target", MANY) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, MANY)
        remote = agent.get_xfer_descs(target.tuples, "DRAM")
        handle = agent.initialize_xfer("READ", local.descriptors(), remote, name)
        for turn in range(1, 4):
            target.ask("fill", turn)
            assert finish(agent, handle, agent.transfer(handle)) == "DONE"
            assert (local.array == turn).all()
        agent.release_xfer_handle(handle)


def test_a_transfer_that_is_released_under_way_leaves_the_agents_usable(agent):
    with Process("target", 4 * MANY) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, 4 * MANY)
        remote = agent.get_xfer_descs(target.tuples, "DRAM")
        for _ in range(10):
            handle = agent.initialize_xfer("READ", local.descriptors(), remote, name)
            agent.transfer(handle)
            agent.release_xfer_handle(handle)
        local.fill(3)  # parts may have been read
        assert transfer(agent, "WRITE", local, target.tuples, name) == "DONE"
        assert target.ask("values") == [3]


def test_memory_that_is_deregistered_is_neither_read_nor_written(agent):
    with Process("target", 4096, value=1) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, 4096, value=2)
        target.ask("deregister")
        for operation in ("WRITE", "READ"):
            with pytest.raises(nixlBackendError):
                transfer(agent, operation, local, target.tuples, name)
        assert target.ask("values") == [1]
        assert (local.array == 2).all()


def test_an_agent_reaches_itself_and_others_of_its_process(agent):
    other = new_agent("other")
    name = agent.add_remote_agent(other.get_agent_metadata())
    ours, theirs = Memory(agent, 4096, value=7), Memory(other, 4096)
    agent.remove_remote_agent(name)
    name = agent.add_remote_agent(other.get_agent_metadata())
    assert transfer(agent, "WRITE", ours, theirs.tuples(), name, b"other") == "DONE"
    assert (theirs.array == 7).all()
    assert notifications(other, 1) == [("initiator", b"other")]
    mine = Memory(agent, 4096)
    assert transfer(agent, "READ", mine, ours.tuples(), "initiator", b"self") == "DONE"
    assert (mine.array == 7).all()
    assert notifications(agent, 1) == [("initiator", b"self")]


def disconnected(agent, handle):
    """Seconds until a transfer that is under way says that its peer is gone."""
    began = time.monotonic()
    while time.monotonic() < began + 10:
        try:
            state = agent.check_xfer_state(handle)
        except nixlRemoteDisconnectError:
            return time.monotonic() - began
        assert state == "PROC", state
    raise AssertionError("nobody says that the peer is gone")


def test_a_killed_peer_ends_its_transfers_and_comes_back_under_its_name(agent):
    local = Memory(agent, 16 * MANY, value=4)
    with Process("bystander", MANY) as bystander:
        spare = agent.add_remote_agent(bystander.metadata)
        for _ in range(3):
            with Process("target", 16 * MANY) as target:
                name = agent.add_remote_agent(target.metadata)
                remote = agent.get_xfer_descs(target.tuples, "DRAM")
                assert transfer(agent, "WRITE", local, target.tuples, name) == "DONE"
                handle = agent.initialize_xfer("WRITE", local.descriptors(), remote, name)
                assert agent.transfer(handle) == "PROC"
                target.process.kill()
                disconnected(agent, handle)
                agent.release_xfer_handle(handle)
            with pytest.raises(nixlRemoteDisconnectError):
                agent.send_notif(name, b"nobody")
            agent.remove_remote_agent(name)
        part = Memory(agent, MANY, value=8)
        assert transfer(agent, "WRITE", part, bystander.tuples, spare) == "DONE"
        assert bystander.ask("values") == [8]


def test_an_agent_that_is_closed_is_gone(agent):
    with Process("target", 16 * MANY) as target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, 16 * MANY)
        remote = agent.get_xfer_descs(target.tuples, "DRAM")
        handle = agent.initialize_xfer("READ", local.descriptors(), remote, name)
        target.ask("close")
        with pytest.raises(nixlRemoteDisconnectError):
            finish(agent, handle, agent.transfer(handle))
        agent.release_xfer_handle(handle)


def test_metadata_of_the_dead_is_refused(agent):
    with Process("target") as target:
        target.process.kill()
        target.process.join()
        with pytest.raises(Exception):
            agent.add_remote_agent(target.metadata)


def test_a_peer_of_another_pid_namespace_is_reached_and_its_death_told(agent):
    try:
        target = Process("target", 16 * MANY, alone=True)
    except PermissionError as error:
        pytest.skip(f"declared skip: {error}")
    with target:
        name = agent.add_remote_agent(target.metadata)
        local = Memory(agent, 16 * MANY, value=6)
        assert transfer(agent, "WRITE", local, target.tuples, name) == "DONE"
        assert target.ask("values") == [6]
        remote = agent.get_xfer_descs(target.tuples, "DRAM")
        handle = agent.initialize_xfer("WRITE", local.descriptors(), remote, name)
        assert agent.transfer(handle) == "PROC"
        target.process.kill()
        disconnected(agent, handle)
        agent.release_xfer_handle(handle)


def test_a_stopped_peer_keeps_no_other_from_its_work(agent):
    local = Memory(agent, 16 * MANY, value=6)
    with Process("stopped", 16 * MANY) as stopped, Process("target", MANY) as target:
        first, second = map(agent.add_remote_agent, (stopped.metadata, target.metadata))
        remote = agent.get_xfer_descs(stopped.tuples, "DRAM")
        handle = agent.initialize_xfer("READ", local.descriptors(), remote, first)
        state = agent.transfer(handle)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        state = finish(agent, handle, state, limit_s=0.3)
        part = Memory(agent, MANY, value=1)
        assert transfer(agent, "WRITE", part, target.tuples, second) == "DONE"
        assert target.ask("values") == [1]
        os.kill(stopped.process.pid, signal.SIGCONT)
        assert finish(agent, handle, state) == "DONE"
        assert local.values() == [0]
        agent.release_xfer_handle(handle)
