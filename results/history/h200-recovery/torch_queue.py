"""Round trips through torch.multiprocessing.Queue, and receivers that are killed: with and without warpipe.torch.install()."""
import json, os, signal, statistics, subprocess, sys, time

SIZES = {"4 KiB": 4 << 10, "64 MiB": 64 << 20, "1 GiB": 1 << 30}

def echo(inbox, outbox):
    import torch
    mine = {}
    while (item := inbox.get()) is not None:
        size = item.numel()
        if size not in mine:
            mine[size] = torch.zeros(size, dtype=torch.uint8, device="cuda")
        mine[size][:1].copy_(item[:1])
        del item
        outbox.put(mine[size])

def receive_for_ever(inbox, ready):
    held = []
    while True:
        held.append(inbox.get())
        ready.put(len(held))

def trips(context):
    import torch
    there, back = context.Queue(), context.Queue()
    child = context.Process(target=echo, args=(there, back)); child.start()
    found = {}
    for name, size in SIZES.items():
        tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
        took = []
        for turn in range({"4 KiB": 220, "64 MiB": 110, "1 GiB": 40}[name]):
            tensor[:1].fill_(turn % 251)
            start = time.monotonic_ns()
            there.put(tensor)
            answer = back.get(timeout=60)
            value = int(answer[0])
            took.append((time.monotonic_ns() - start) / 1e3)
            assert value == turn % 251, (value, turn)
            del answer
        took = sorted(took[10:])
        found[name] = {"p50_us": statistics.median(took), "p90_us": took[len(took) * 9 // 10], "max_us": took[-1]}
    there.put(None); child.join(30)
    return found

def kills(context, rounds, at_once):
    import torch
    def used():
        torch.cuda.synchronize(); free, total = torch.cuda.mem_get_info(); return (total - free) / 2**20
    at = []
    for turn in range(rounds // at_once):
        queues = [(context.Queue(), context.Queue()) for _ in range(at_once)]
        children = [context.Process(target=receive_for_ever, args=pair, daemon=True) for pair in queues]
        [c.start() for c in children]
        for (inbox, _) in queues:
            for _ in range(3):
                inbox.put(torch.ones(1 << 20, device="cuda"))
        for (_, ready) in queues:
            for _ in range(2): ready.get(timeout=120)
        for c in children: os.kill(c.pid, signal.SIGKILL)
        for c in children: c.join()
        del queues, children
        end = time.monotonic() + 10
        while torch.cuda.memory_allocated() > (at[0]["allocated"] if at else 0) and time.monotonic() < end: time.sleep(0.05)
        at.append({"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "used_mib": used(), "fds": len(os.listdir("/proc/self/fd"))})
        if sys.argv[1] == "warpipe": at[-1]["stats"] = str(__import__("warpipe").torch.stats())
    return at

def main():
    import torch
    context = torch.multiprocessing.get_context("spawn")
    if sys.argv[1] == "warpipe":
        import warpipe
        warpipe.torch.install()
    out = {}
    try:
        out["trips"] = trips(context)
        if len(sys.argv) > 2: out["kills"] = kills(context, int(sys.argv[2]), 8)
    except BaseException as error:
        import traceback; out["error"] = traceback.format_exc()[-1500:]
    print("RESULT " + json.dumps(out), flush=True)
    os._exit(0)

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] != "all": main()
    report = {}
    for alloc in ("expandable_segments:False", "expandable_segments:True"):
        for way in ("plain", "warpipe"):
            command = [sys.executable, __file__, way] + ([sys.argv[2]] if way == "warpipe" else [])
            try:
                ran = subprocess.run(command, env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": alloc}, capture_output=True, text=True, timeout=170)
                line = [l for l in ran.stdout.splitlines() if l.startswith("RESULT ")]
                report[f"{way}, {alloc}"] = json.loads(line[0][7:]) if line else {"error": ran.stderr[-1500:]}
            except subprocess.TimeoutExpired as e:
                report[f"{way}, {alloc}"] = {"error": f"timeout {(e.stderr or b'')[-800:]}"}
            print(alloc, way, json.dumps(report[f"{way}, {alloc}"])[:1200], flush=True)
    json.dump(report, open(sys.argv[3], "w"), indent=1)
