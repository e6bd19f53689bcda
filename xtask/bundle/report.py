"""Puts together what `run` left: report.json (one entry a mode) and summary.txt. Fails if any part failed.

Arguments: the work folder (parts.tsv, parts/NAME.out and .err), the output folder, the mode.
"""

import csv
import datetime
import json
import pathlib
import re
import subprocess
import sys

TIMED_OUT = (124, 137)
CARGO_TEST = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored;", re.MULTILINE)
LAST_LINE = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$")
TAIL_LINES = 20
# All other parts are test programs: one that passes nothing, or does not say how much, has failed.
WITHOUT_COUNTS = ("mps-daemon", "doctor", "python-install", "demo", "demo-text", "render", "bench", "python-bench",
                  "comparison", "bridge-bench", "bridge-bench-host", "host-bench", "weights-bench", "torch-queue-bench",
                  "mpi-install", "mpi-65536", "mpi-4194304", "mpi-268435456", "mpi-kill")
# Parts that leave a report of their own beside ours, NAME-MODE.json.
REPORTING = ("conformance", "bench", "python-bench", "comparison", "bridge-bench", "bridge-bench-host", "host-bench",
             "weights-bench", "torch-queue-bench")
# An example's last line is its result.
EXAMPLES = ("render",)


def counts_of(output):
    """Sums what a test program says of itself; None if it says nothing."""
    results = [tuple(map(int, found)) for found in CARGO_TEST.findall(output)]
    # A wrapper such as compute-sanitizer adds lines of its own behind the program's last.
    counted = [found for found in map(LAST_LINE.match, map(str.strip, output.splitlines())) if found]
    if counted:
        results.append(tuple(map(int, counted[-1].groups())))
    if not results:
        return None
    return dict(zip(("passed", "failed", "skipped"), map(sum, zip(*results))))


def status_of(name, code, counts):
    if code == "skipped":
        return "skipped"
    if int(code) in TIMED_OUT:
        return "timed out"
    clean = name in WITHOUT_COUNTS or (counts is not None and counts["passed"] > 0 and counts["failed"] == 0)
    return "passed" if int(code) == 0 and clean else "failed"


def read(path):
    return path.read_text(errors="replace") if path.exists() else ""


def read_parts(work):
    parts = []
    for name, code, seconds in csv.reader(open(work / "parts.tsv"), delimiter="\t"):
        output, errors = read(work / "parts" / f"{name}.out"), read(work / "parts" / f"{name}.err")
        counts = counts_of(output)
        part = {"name": name, "status": status_of(name, code, counts), "seconds": int(seconds), "counts": counts}
        if name in EXAMPLES:
            part["said"] = (output.splitlines() or [""])[-1]
            if part["status"] == "passed" and not part["said"].startswith("ok: "):
                part["status"] = "failed"
        if part["status"] not in ("passed", "skipped"):
            part["exit_code"] = int(code)
            part["last_lines"] = (output.splitlines() + errors.splitlines())[-TAIL_LINES:]
        parts.append(part)
    return parts


def read_json(text, name, parts):
    """The JSON that part `name` made; a part that passed and made none has failed."""
    try:
        return json.loads(text) if name in REPORTING else [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        for part in parts:
            if part["name"] == name and part["status"] == "passed":
                part.update(status="failed", last_lines=[f"it exited well but left no valid JSON: {error}"])
        return None


def devices():
    """Name, driver version and memory of each GPU; empty where nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi does not answer: {error}", file=sys.stderr)
        return []
    rows = [[field.strip() for field in line.split(",")] for line in said.splitlines() if line.count(",") == 2]
    return [dict(zip(("name", "driver", "memory"), row)) for row in rows]


def keep(path, head, report):
    """Writes a part's report with the head that says where it comes from."""
    path.write_text(json.dumps({"head": head, **report}, indent=1) + "\n")


def commit():
    """The commit that the programs were built from, as `cargo xtask gpu-bundle` wrote it down."""
    return read(pathlib.Path(__file__).with_name("commit")).strip() or "unknown"


def flat(value, path=()):
    """Every leaf of a JSON value as (path, leaf)."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for index, inner in enumerate(value):
            yield from flat(inner, (*path, str(index)))
    else:
        yield path, value


def lines_of(run):
    machine = ", ".join(sorted({f"{gpu['name']} (driver {gpu['driver']})" for gpu in run["devices"]})) or "unknown GPU"
    yield f"{run['mode']}: {machine}, {len(run['devices'])} seen, commit {run.get('commit', 'unknown')}, {run['date']}"
    for part in run["parts"]:
        counts = part["counts"]
        said = ", ".join(f"{number} {word}" for word, number in counts.items()) if counts else part.get("said", "")
        yield f"  {part['name']:<28} {part['status']:<10} {part['seconds']:>5} s  {said}".rstrip()
        yield from (f"      | {line}" for line in part.get("last_lines", []))
    if run["demo"]:
        yield "  figures: demo"
        figures = {key: value for key, value in run["demo"][-1].items() if key != "claims"}
        yield from (f"    {'.'.join(path)} = {leaf}" for path, leaf in flat(figures))
    if run["bench"]:
        yield "  figures: bench (ours, floor in the same run, ratio, wanted)"
        yield from (f"    {line}" for line in map(figure_line, run["bench"]["figures"]))
    if run.get("python-bench"):
        yield "  figures: python-bench (warpipe from Python, the other in the same run, ratio, wanted)"
        yield from (f"    {line}" for line in map(figure_line, run["python-bench"]["figures"]))
        yield from (f"    {line}" for line in map(contestant_line, run["python-bench"]["contestants"]))
    for name in REPORTING[3:]:
        if run.get(name):
            yield f"  figures: {name} (ours, the other in the same run, ratio, wanted)"
            yield from (f"    {line}" for line in map(figure_line, run[name]["figures"]))
    yield ""


def contestant_line(found):
    name = f"{found['place']}, {found['bytes']} bytes: {found['contestant']}"
    if found["status"] != "measured":
        return f"{name:<72} {found['status']}: {found['reason']}"
    spread = " ".join(f"{rank} {found['awaited_ns'][rank] / 1e3:.1f}" for rank in ("p50", "p90", "p99"))
    return f"{name:<72} {found['chained_us']:>12.3f} us     awaited {spread}"


def figure_line(figure):
    floor = "" if figure["floor"] is None else f"{figure['floor']:.3f}"
    ratio = "" if figure["ratio"] is None else f"{figure['ratio']:.3f}"
    wanted = "" if not isinstance(figure["wanted"], dict) else " ".join(f"{key} {value}" for key, value in figure["wanted"].items())
    met = {True: "met", False: "NOT MET", None: ""}[figure["met"]]
    name = f"{figure['bench']}: {figure['name']}"
    return f"{name:<72} {figure['ours']:>12.3f} {figure['unit']:<5} {floor:>12} {ratio:>8}  {wanted} {met}".rstrip()


def earlier_runs(path):
    try:
        return json.loads(read(path))["runs"]
    except (ValueError, KeyError, TypeError):
        return {}


def main(work, out, mode):
    work, out = pathlib.Path(work), pathlib.Path(out)
    parts = read_parts(work)
    if not parts:
        sys.exit("no part ran")
    outputs = {name: read_json(read(work / "parts" / f"{name}.out"), name, parts) for name in ("doctor", "demo")}
    files = {name: read_json(read(out / f"{name}-{mode}.json"), name, parts) for name in REPORTING}
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    gpus = devices()
    head = {"commit": commit(), "gpu": gpus[0]["name"] if gpus else "unknown", "driver": gpus[0]["driver"] if gpus else "unknown"}
    head |= {"gpus": len(gpus), "date": date, "mode": mode}
    # A benchmark fails with a contestant that fails, and the report says which; one that was cut off left what it had.
    ran = {part["name"] for part in parts if part["status"] != "skipped"}
    for name, report in files.items():
        # One without a head is of a run that was killed before it came here.
        if report is not None and (name in ran or "head" not in report):
            keep(out / f"{name}-{mode}.json", head, report)
    if "demo-text" in ran:
        keep(out / f"demo-{mode}.json", head, {"output": read(work / "parts" / "demo-text.out").splitlines()})
    run = {"mode": mode, "commit": head["commit"], "date": date, "devices": gpus, "parts": parts, **files, **outputs}
    runs = {**earlier_runs(out / "report.json"), mode: run}
    (out / "report.json").write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    summary = "\n".join(line for mode in sorted(runs) for line in lines_of(runs[mode]))
    (out / "summary.txt").write_text(summary)
    print("\n".join(lines_of(run)))
    tally = [part["status"] for part in parts]
    bad = len(tally) - tally.count("passed") - tally.count("skipped")
    print(f"parts: {tally.count('passed')} passed, {bad} failed, {tally.count('skipped')} skipped")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
