"""A real parallel sweep, and what is done to it: Ctrl-C, kill -9 of the parent, kill of a worker."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from toymha.runs import find

WORDS = (
    "train -m seed=0,1,2,3 data=pydoc n_layer=1 dim=16 seq_len=16 batch_size=4 budget.steps=1500 budget.eval_every=100 "
    "budget.eval_tokens=64 budget.sample_tokens=0 workers=2 threads=1 device=cpu"
).split()

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals as POSIX has them")


def start():
    command = [sys.executable, "-m", "toymha", *WORDS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)


def wait_for_checkpoint(process):
    """Until some run is under way and can be resumed."""
    for _ in range(600):
        time.sleep(0.1)
        if any((r.path / "checkpoint.pt").is_file() and r.status == "running" for r in find("outputs")):
            return
        assert process.poll() is None, process.communicate()
    raise AssertionError("no checkpoint in a minute")


def results():
    """Seed -> the final numbers, without what depends on the clock."""
    return {r.info["values"]["seed"]: r.summary["val"] for r in find("outputs")}


def workers_of(process):
    ps = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True
    ).stdout
    return [int(pid) for pid, args in re.findall(r"(\d+) (.*)", ps) if "spawn_main" in args]


def test_stopped_and_killed_and_continued(tmp_path, monkeypatch):
    """After Ctrl-C and SIGKILL of the parent the same command ends with the numbers of an undisturbed sweep."""
    monkeypatch.chdir(tmp_path)
    process = start()
    wait_for_checkpoint(process)
    os.killpg(process.pid, signal.SIGINT)  # the terminal's Ctrl-C reaches the whole group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command" in err and "Traceback" not in err
    assert {r.status for r in find("outputs")} <= {"interrupted", "done"}

    process = start()
    wait_for_checkpoint(process)
    process.kill()
    process.communicate()

    process = start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert {r.status for r in find("outputs")} == {"done"} and len(list(find("outputs"))) == 4
    assert all(len(list(r.path.glob("events*"))) == 1 for r in find("outputs"))
    assert not list(tmp_path.rglob("*.tmp"))
    disturbed = results()

    (tmp_path / "calm").mkdir()
    monkeypatch.chdir(tmp_path / "calm")
    process = start()
    process.communicate(timeout=120)
    assert process.returncode == 0 and results() == disturbed


@pytest.mark.parametrize("signum, status", [(signal.SIGTERM, "interrupted"), (signal.SIGKILL, "failed")])
def test_a_worker_that_goes_takes_its_run_alone(tmp_path, monkeypatch, signum, status):
    """The other runs end, the exit status is 1, the last lines name the run; the same command finishes it."""
    monkeypatch.chdir(tmp_path)
    process = start()
    wait_for_checkpoint(process)
    os.kill(workers_of(process)[0], signum)
    out, err = process.communicate(timeout=120)
    statuses = sorted(r.status for r in find("outputs"))
    assert process.returncode == 1 and statuses == sorted(["done"] * 3 + [status]), out + err
    assert re.search(rf"^{status}: .*seed=\d", out, re.M)
    process = start()
    process.communicate(timeout=120)
    assert process.returncode == 0 and {r.status for r in find("outputs")} == {"done"}
