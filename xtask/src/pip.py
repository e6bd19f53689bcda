import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

WHEEL = "pip-25.3-py3-none-any.whl"

index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
asked = urllib.request.Request(f"{index}/pip/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
with urllib.request.urlopen(asked, timeout=60) as answer:
    found = next(file for file in json.load(answer)["files"] if file["filename"] == WHEEL)
with urllib.request.urlopen(urllib.request.urljoin(asked.full_url, found["url"]), timeout=60) as answer:
    content = answer.read()
if hashlib.sha256(content).hexdigest() != found["hashes"]["sha256"]:
    sys.exit(f"{WHEEL} is not what {index} says it is")
with tempfile.TemporaryDirectory() as folder:
    wheel = pathlib.Path(folder, WHEEL)
    wheel.write_bytes(content)
    # A wheel is an archive that Python runs from.
    install = [sys.executable, f"{wheel}/pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", str(wheel)]
    sys.exit(subprocess.run(install).returncode)
