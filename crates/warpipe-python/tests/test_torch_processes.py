"""warpipe.torch: GPU tensors in messages of torch.multiprocessing, without another change of the program. On the host,
tensors in memory that the test declares so stand for those of a GPU."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import types
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
from conftest import LIMIT_SECONDS, until
from peers import kill, process, said
from test_processes import kills

import warpipe
from warpipe import _messages

torch = pytest.importorskip("torch")

import tensors  # noqa: E402
from tensors import described, fresh  # noqa: E402

carried = warpipe.torch
mp = torch.multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def installed(domain):
    carried.install(domain=domain)
    yield
    until(lambda: carried.stats().nbytes == 0 or gc.collect() < 0, "the end of all shares")
    carried.uninstall()
    for server, _ in carried.TABLE.servers.values():
        server.close()
    carried.TABLE.begin()
    carried._warned.clear()
    carried._device_like.clear()


@pytest.fixture(scope="module")
def ask():
    """Sends to a process that has not called install(), and gives what it says. One for all tests: it takes seconds."""
    inbox, outbox = mp.Queue(), mp.Queue()
    child = mp.Process(target=tensors.answer, args=(inbox, outbox), daemon=True)
    child.start()

    def send(found):
        inbox.put(found)
        return outbox.get(timeout=LIMIT_SECONDS)

    yield send
    inbox.put(None)
    child.join(LIMIT_SECONDS)
    assert child.exitcode == 0
    for queue in (inbox, outbox):
        queue.close()
        queue.join_thread()


def as_sent(tensor):
    """What the other process should say of a carried tensor."""
    name, dtype, shape, strides, requires_grad, _, values = described(tensor)
    return name, dtype, shape, strides, requires_grad, True, values


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.complex64]


def test_tensors_of_every_type_arrive_as_they_were_sent(ask, device):
    for dtype in DTYPES:
        tensor = fresh(device, torch.arange(12).view(3, 4).to(dtype))
        assert ask(tensor) == as_sent(tensor)


def test_views_arrive_with_their_strides_and_offsets(ask, device):
    whole = fresh(device, torch.arange(60).view(3, 4, 5).float())
    views = [whole[1:, ::2], whole.permute(2, 0, 1), whole[1, 2, 3], whole[:, :1].expand(3, 4, 5), whole[..., 1:4], whole[3:]]
    for view in views:
        assert ask(view) == as_sent(view)
    assert ask(views) == [as_sent(view) for view in views]


def test_conjugated_and_negated_views_arrive_with_their_values(ask, device):
    tensor = fresh(device, torch.tensor([1 + 2j, 3 - 4j]))
    for view in (tensor.conj(), tensor.conj().imag, tensor.imag):
        assert ask(view) == as_sent(view)


def test_tensors_without_elements_arrive(ask, device):
    empty = torch.empty((0, 3), device=tensors.place(device))
    if device.kind == "cuda":
        assert ask(empty)[:4] == as_sent(empty)[:4]
    part = fresh(device, torch.arange(6.0))[6:]
    assert ask(part) == as_sent(part)
    assert ask(carried._rebuild_tensor(torch.Tensor, carried._empty_storage(device.uuid), torch.int32, 0, (0, 2), (2, 1), False, False, False))[2] == (0, 2)


def test_containers_arrive_with_the_tensors_in_them(ask, device):
    found = {"a": [fresh(device, torch.ones(3)), {"b": (fresh(device, torch.zeros(2)), "text", 3)}], "host": torch.ones(2)}
    answer = ask(found)
    assert answer["a"][0] == as_sent(found["a"][0])
    assert answer["a"][1]["b"] == [as_sent(found["a"][1]["b"][0]), "text", 3]
    # A host tensor goes as it always does.
    assert answer["host"] == described(found["host"]) and not answer["host"][5]


def test_parameters_and_leaves_keep_that_they_require_gradients(ask, device):
    data = fresh(device, torch.ones(4))
    parameter, frozen = torch.nn.Parameter(data), torch.nn.Parameter(fresh(device, torch.ones(2, dtype=torch.int32)), requires_grad=False)
    leaf = fresh(device, torch.ones(2)).requires_grad_()
    for tensor in (parameter, frozen, leaf):
        assert ask(tensor) == as_sent(tensor)
    assert ask(parameter)[0] == "Parameter"


def test_sparse_tensors_arrive_in_the_memory_of_their_parts(ask, device):
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])
    coo, csr, csc = dense.to_sparse_coo(), dense.to_sparse_csr(), dense.to_sparse_csc()
    shape = tuple(dense.shape)
    made = [torch.sparse_coo_tensor(*(fresh(device, part) for part in tensors.sparse_parts(coo)), shape, is_coalesced=True)]
    for one in (csr, csc):
        parts = [fresh(device, part) for part in tensors.sparse_parts(one)]
        made.append(torch.sparse_compressed_tensor(*parts, shape, layout=one.layout))
    made.append(made[0].detach().requires_grad_())
    for tensor in made:
        layout, found_shape, requires_grad, values, carried_parts = ask(tensor)
        assert (layout, found_shape, requires_grad) == (str(tensor.layout), shape, tensor.requires_grad)
        assert values == dense.tolist() and all(carried_parts)
    # On the host they go their usual way.
    assert ask(csr)[3:] == (dense.tolist(), [False] * 3)


def test_a_state_dict_arrives(ask, device):
    model = torch.nn.Linear(4, 3)
    for parameter in model.parameters():
        parameter.data = fresh(device, parameter.data)
    state = dict(model.state_dict())
    assert ask(state) == {name: as_sent(tensor) for name, tensor in state.items()}


def test_a_computed_tensor_that_requires_gradients_is_named_in_the_error(device):
    ours, _ = multiprocessing.Pipe()
    computed = fresh(device, torch.ones((2, 3))).requires_grad_() * 2
    if device.kind == "host":
        computed = fresh(device, torch.ones((2, 3))).requires_grad_().view(3, 2)
    with pytest.raises(RuntimeError, match=r"tensor float32\[\d, \d\] on .* is computed with gradients.*detach\(\)"):
        ours.send(computed)
    assert carried.stats().unclaimed == 0


def test_a_tensor_is_the_same_memory_in_both_processes(device):
    tensor = fresh(device, torch.arange(4.0))
    with process(tensors.add_one) as (_, pipe):
        pipe.send([tensor])
        assert said(pipe) == [[1.0, 2.0, 3.0, 4.0], 1]
        assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert carried.stats() == (0, 1, tensor.untyped_storage().nbytes())
        pipe.send("release")
        assert said(pipe) == "release"
        until(lambda: carried.stats() == (0, 0, 0), "the release")


def test_views_share_one_storage_in_their_receiver_also_across_messages(device):
    whole = fresh(device, torch.zeros(6))
    with process(tensors.add_one) as (_, pipe):
        pipe.send([whole, whole[:3], whole[3:]])
        # One storage: the first tensor sees what is written through the others.
        assert said(pipe) == [[2.0] * 6, [2.0] * 3, [2.0] * 3, 1]
        pipe.send([whole[1:2]])
        assert said(pipe) == [[3.0], 1]
        assert whole.tolist() == [2.0, 3.0, 2.0, 2.0, 2.0, 2.0]


def test_memory_that_its_owner_frees_and_uses_again_is_the_new_tensor_in_the_receiver(device):
    with process(tensors.add_one) as (_, pipe):
        for value in range(8):
            tensor = fresh(device, torch.full((1024,), float(value)))
            pipe.send([tensor])
            del tensor
            assert said(pipe) == [[value + 1.0] * 1024, 1]
            pipe.send("release")
            assert said(pipe) == "release"
            until(lambda: carried.stats().nbytes == 0, "the release")


@kills
def test_a_killed_receiver_gives_the_memory_back(device):
    tensor = fresh(device, torch.ones(4))
    with process(tensors.add_one) as (child, pipe):
        pipe.send([tensor])
        said(pipe)
        assert carried.stats().claimed == 1
        kill(child)
        until(lambda: carried.stats().nbytes == 0, "the release")
        assert tensor.tolist() == [2.0] * 4


def test_arguments_of_a_process_arrive(device):
    ours, theirs = mp.Pipe()
    tensor = fresh(device, torch.arange(3))
    child = mp.Process(target=tensors.received_argument, args=(theirs, [tensor, tensor[1:]]), daemon=True)
    child.start()
    assert said(ours) == [as_sent(tensor), as_sent(tensor[1:])]
    ours.send("end")
    child.join(LIMIT_SECONDS)
    assert child.exitcode == 0


@pytest.mark.parametrize("is_current", [True, False])
def test_a_tensor_that_a_stream_of_its_sender_completes_late_is_complete_in_its_receiver(device, is_current):
    if device.kind == "host":
        pytest.skip("the host has no streams of PyTorch's")
    current = device.ordinal if is_current else next(n for n in range(2) if n != device.ordinal)
    if current >= torch.cuda.device_count():
        pytest.skip("there is one GPU")
    queue, (ours, theirs) = mp.Queue(), mp.Pipe()
    child = mp.Process(target=tensors.put_late, args=(queue, theirs, device, current), daemon=True)
    child.start()
    for number in range(8):
        tensor = queue.get(timeout=LIMIT_SECONDS)
        assert tensor.unique().tolist() == [number]
        ours.send("next")
    child.join(LIMIT_SECONDS)
    assert child.exitcode == 0


def test_a_tensor_that_is_put_while_its_stream_is_captured_is_refused_and_the_capture_goes_on(device, capsys):
    if device.kind == "host":
        pytest.skip("the host has no streams of PyTorch's")
    queue, tensor = mp.Queue(), torch.zeros(4, device=tensors.place(device))
    queue.put("before")
    assert queue.get(timeout=LIMIT_SECONDS) == "before"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        queue.put(tensor)
        queue.put("inside")
        said = []
        until(lambda: said.append(capsys.readouterr().err) or "tensor float32[4] on" in "".join(said), "the error")
    assert queue.get(timeout=LIMIT_SECONDS) == "inside"
    graph.replay()
    queue.put(tensor)
    assert queue.get(timeout=LIMIT_SECONDS).tolist() == [1.0, 1.0, 1.0, 1.0]
    queue.close()
    queue.join_thread()


def test_a_message_is_ordered_behind_each_stream_of_its_thread_but_the_default_ones(monkeypatch):
    asked = types.SimpleNamespace(current=0)

    @contextlib.contextmanager
    def on(index):
        asked.current, before = index, asked.current
        yield
        asked.current = before

    streams = {0: 0, 1: 7, 2: 8}
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 3,
        device=on,
        is_current_stream_capturing=lambda: asked.current == 2,
        current_stream=lambda: types.SimpleNamespace(record_event=lambda: f"behind {streams[asked.current]}"),
    )
    monkeypatch.setattr(carried, "_torch", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(carried, "_current_stream", streams.__getitem__)
    assert carried._order() == {1: "behind 7", 2: carried._CAPTURED}
    assert asked.current == 0


class Nested:
    def __reduce__(self):
        return Nested.rebuilt, (bytes(ForkingPickler.dumps(Order())),)

    rebuilt = staticmethod(pickle.loads)


class Order:
    def __reduce__(self):
        return dict, (list(_messages.current().order.items()),)


def test_a_message_within_a_message_is_ordered_behind_the_same(monkeypatch):
    monkeypatch.setattr(carried, "_order", lambda: {1: "behind"})
    queue = mp.Queue()
    queue.put([Order(), Nested()])
    assert queue.get(timeout=LIMIT_SECONDS) == [{1: "behind"}] * 2


@pytest.mark.parametrize("context", [multiprocessing.get_context("spawn"), mp])
def test_a_pool_carries_arguments_and_results(device, context):
    given = [fresh(device, torch.full((3,), float(number))) for number in range(6)]
    with context.Pool(2) as pool:
        results = pool.map(tensors.twice, given)
        for number, result in enumerate(results):
            assert tensors.is_carried(result) and result.tolist() == [2.0 * number] * 3
        del result, results
        pool.close()
        pool.join()


@pytest.mark.parametrize("work", [tensors.make, tensors.start_a_child_that_makes])
def test_processes_that_are_spawned_and_their_children_have_it_installed(device, work):
    ours, theirs = mp.Pipe()
    # A daemonic process has no children.
    child = mp.Process(target=work, args=(theirs, device))
    child.start()
    tensor = said(ours)
    assert tensors.is_carried(tensor) and tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    ours.send("end")
    child.join(LIMIT_SECONDS)
    assert child.exitcode == 0


def ended(child, ours):
    ours.send("end")
    child.join(LIMIT_SECONDS)
    assert child.exitcode == 0


@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue", "JoinableQueue"])
def test_queues_and_processes_that_were_made_before_install_carry_tensors_both_ways(domain, device, kind):
    carried.uninstall()
    inbox, outbox, answers = getattr(mp, kind)(), getattr(mp, kind)(), mp.Queue()
    ours, theirs = mp.Pipe()
    tensor = fresh(device, torch.arange(3.0))
    child = mp.Process(target=tensors.put_made, args=(outbox, theirs, device))
    other = mp.Process(target=tensors.answer, args=(inbox, answers), daemon=True)
    carried.install(domain=domain)
    child.start()
    other.start()
    inbox.put(tensor)
    assert answers.get(timeout=LIMIT_SECONDS) == as_sent(tensor)
    received = outbox.get()
    assert tensors.is_carried(received) and received.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    del received
    inbox.put(None)
    ended(child, ours)
    other.join(LIMIT_SECONDS)
    assert other.exitcode == 0


def test_a_process_has_the_options_of_its_start_and_not_those_of_its_making(domain, device):
    ours, theirs = mp.Pipe()
    child = mp.Process(target=tensors.say_options, args=(theirs, device))
    carried.install(domain=domain, timeout=7)
    child.start()
    assert said(ours) == (True, os.fspath(domain), 7.0)
    ended(child, ours)
    ours, theirs = mp.Pipe()
    child = mp.Process(target=tensors.say_options, args=(theirs, device))
    carried.uninstall()
    child.start()
    assert said(ours) is None, "uninstall() holds for processes that were made before it"
    ended(child, ours)


@kills
def test_a_tensor_of_a_dead_sender_is_reported_where_its_memory_went_with_it(device):
    with process(tensors.make, device) as (sender, pipe):
        tensor = said(pipe)
        carried.check(tensor)
        kill(sender)
        expected = rf"tensor float32\[6\] on .* of process {sender.pid} \(.*\) cannot be used any more"
        with pytest.raises(warpipe.PeerGoneError, match=expected):
            until(lambda: carried.check(tensor), "the error")


@pytest.mark.parametrize("other", [3, None, "a tensor", [torch.zeros(2)]])
def test_what_is_no_tensor_is_not_checked(other):
    with pytest.raises(warpipe.NotATensorError, match=type(other).__name__):
        warpipe.torch.check(other)


@kills
def test_a_tensor_of_a_pool_stays_valid_after_its_sender(device):
    if device.kind == "host":
        pytest.skip("PyTorch has pools of GPU memory alone")
    with process(tensors.make_in_pool, device) as (sender, pipe):
        tensor = said(pipe)
        kill(sender)
        carried.check(tensor)
        assert tensors.is_carried(tensor) and tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@kills
@pytest.mark.parametrize("is_pooled", [False, True])
def test_a_kernel_of_a_receiver_writes_pytorchs_memory_and_faults_in_that_of_a_pool(device, is_pooled):
    if device.kind == "host":
        pytest.skip("PyTorch has pools of GPU memory alone")
    maker = process(tensors.make_and_say, device, is_pooled)
    with maker as (_maker, made), process(tensors.write) as (_writer, pipe):
        assert made.poll(LIMIT_SECONDS), "the tensor does not come"
        # As it is: this process opens none of it.
        pipe.send_bytes(made.recv_bytes())
        how = said(pipe)
        made.send("say")
        found = said(made)
        if is_pooled:
            assert "illegal memory access" in how and found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        else:
            assert how == "written" and found == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@kills
def test_a_tensor_that_was_not_received_before_its_sender_died_is_named(device):
    with process(tensors.make, device) as (sender, pipe):
        until(lambda: pipe.poll(0.01), "the message")
        kill(sender)
        expected = rf"tensor float32\[6\] on .* of process {sender.pid} .*; keep the sender running"
        with pytest.raises(warpipe.PeerGoneError, match=expected):
            pipe.recv()


def test_a_received_tensor_is_sent_on_as_a_copy_and_that_is_said_once(ask, device):
    with process(tensors.make, device) as (_, pipe):
        tensor = said(pipe)
        # In a process that reports warnings as exceptions, the thread that sends would end.
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert ask([tensor, tensor[2:]]) == [as_sent(tensor), as_sent(tensor[2:])]
            ask(tensor)
        assert [one.category for one in told] == [warpipe.CopyWarning]
        assert "tensor float32[6]" in str(told[0].message)
        pipe.send("end")


def test_a_copy_is_an_error_if_it_is_not_allowed(domain, device):
    with process(tensors.make, device) as (_, pipe):
        tensor = said(pipe)
        carried.install(domain=domain, copy=False)
        ours, _ = multiprocessing.Pipe()
        with pytest.raises(warpipe.NotExportableError, match=r"tensor float32\[6\].*install\(copy=True\)"):
            ours.send(tensor)
        pipe.send("end")


def test_storages_and_tensors_that_share_them_arrive_as_one(device):
    tensor = fresh(device, torch.arange(4.0))
    ours, theirs = multiprocessing.Pipe()
    ours.send([tensor, tensor.untyped_storage()])
    again, storage = theirs.recv()
    assert again.untyped_storage()._cdata == storage._cdata == tensor.untyped_storage()._cdata


def test_after_uninstall_tensors_go_their_usual_way(ask, device):
    if device.kind == "cuda":
        pytest.skip("a GPU tensor's usual way is PyTorch's own")
    tensor = fresh(device, torch.ones(3))
    assert ask(tensor) == as_sent(tensor)
    carried.uninstall()
    assert not ask(tensor)[5]
    assert "dump" not in vars(multiprocessing.reduction.ForkingPickler)
    assert multiprocessing.queues.Queue.put.__module__ == "multiprocessing.queues" == multiprocessing.queues.JoinableQueue.put.__module__
    assert not hasattr(multiprocessing.queues.Queue.put, "__wrapped__")
    carried.uninstall()


def test_a_message_in_progress_at_uninstall_goes_its_usual_way(monkeypatch):
    def uninstalled(*_):
        carried.uninstall()

    monkeypatch.setattr(carried, "_device_of", uninstalled)
    ours, theirs = multiprocessing.Pipe()
    ours.send(torch.ones(2))
    assert theirs.recv().tolist() == [1.0, 1.0]


def test_one_reason_to_copy_is_one_whatever_the_process_and_the_address(device):
    storage = carried._Storage(fresh(device, torch.ones(2)).untyped_storage(), device, "tensor")
    reasons = [f"its memory is of process {pid} (name)" for pid in (7, 1234)]
    reasons += [f"{address:#x} is in memory of a pool: none" for address in (0x7F00, 0xFE12)]
    with pytest.warns(warpipe.CopyWarning) as told:
        for why in reasons:
            storage.warn(why)
    assert len(told) == 2


def test_a_joinable_queue_carries_tensors(device):
    queue = mp.JoinableQueue()
    tensor = fresh(device, torch.ones(3))
    queue.put(obj=tensor, timeout=LIMIT_SECONDS)
    assert queue.get(timeout=LIMIT_SECONDS).untyped_storage()._cdata == tensor.untyped_storage()._cdata
    queue.task_done()
    queue.join()
    queue.close()
    queue.join_thread()


def test_installing_again_changes_the_options(domain):
    carried.install(domain=domain, copy=False, timeout=5)
    assert carried.TABLE.options == (False, os.fspath(domain), 5.0)
    for timeout in (0, float("inf"), float("nan")):
        with pytest.raises(warpipe.ArgumentError, match="timeout"):
            carried.install(timeout=timeout)
    carried.install(domain="names")
    assert carried.TABLE.options.domain == os.path.abspath("names")
    carried.install()
    assert carried.TABLE.options == (True, None, 60.0)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_data_loader_gets_tensors_of_its_workers(device, persistent):
    loader = torch.utils.data.DataLoader(
        tensors.Batches(device, 12), batch_size=3, num_workers=2, collate_fn=tensors.on_device,
        multiprocessing_context="spawn", persistent_workers=persistent,
    )  # fmt: skip
    for _ in range(2):
        seen = []
        for batch in loader:
            assert tensors.is_carried(batch) and batch.shape == (3, 4)
            seen += batch[:, 0].tolist()
        assert seen == [float(number) for number in range(12)]
