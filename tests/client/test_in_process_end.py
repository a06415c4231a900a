"""What is left of a model in process when it is closed, forgotten, interrupted or forked."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from beamline import load
from beamline.errors import (
    BeamlineError,
)
from tests.client.callers import in_process
from tests.serving.doubles import EngineDouble
from tests.support.processes import ROOT, environment, eventually

EN_DE = ROOT / "model_repo" / "en-de"
LINES = [
    "Save the file.",
    "Click the button to save your changes.",
    "The window could not be opened, because another program is using it.",
    "Open.",
    "Do you want to delete this folder and everything in it?",
]


class TestTheEnd:
    def test_no_thread_is_left(self) -> None:
        before = set(threading.enumerate())  # some of which may end meanwhile
        model = load(EN_DE, threads=2)
        model.translate(LINES)
        assert set(threading.enumerate()) - before
        model.close()
        assert not set(threading.enumerate()) - before

    def test_nor_of_a_model_that_was_forgotten(self) -> None:
        before = set(threading.enumerate())
        model = load(EN_DE, threads=2)
        twin = model.aio
        model.translate(LINES)
        mine = set(threading.enumerate()) - before
        del model
        gc.collect()
        assert all(thread.is_alive() for thread in mine if thread.name != "beamline-text")  # the twin has it
        del twin
        gc.collect()
        for thread in mine:
            thread.join(60)
            assert not thread.is_alive()

    @pytest.mark.parametrize(
        "last",
        [
            "pass",
            "stream = model.translate_stream(text); next(stream)",
            "threading.Thread(target=model.translate, args=([text] * 2000,), daemon=True).start(); time.sleep(0.3)",
            "asyncio.run(model.aio.translate(text))",
        ],
    )
    def test_an_interpreter_ends_without_close(self, last: str) -> None:
        code = (
            "import asyncio, sys, threading, time\nfrom beamline import load\nmodel = load(sys.argv[1], threads=2)\n"
            f"text = {LINES[2]!r}\nprint(model.translate(text).text)\n{last}\nprint('end', flush=True)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(EN_DE)],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0
        # A thread of the user's that is still waiting then is told, in a traceback that the end may cut off.
        assert done.stderr == "" or done.stderr.startswith("Exception in thread")
        assert done.stdout.endswith("end\n")

    def test_ctrl_c_ends_a_call_and_not_the_model(self) -> None:
        engine = EngineDouble(held=True)
        with in_process(engine) as model:

            def interrupt() -> None:
                while len(engine.submitted) < 5:
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                model.translate(["a"] * 5)
            thread.join()
            eventually(lambda: len(engine.cancelled) == 5, "the call is cancelled")
            engine.release()
            assert model.translate("b").text == "b"

    def test_a_child_of_a_fork_is_told(self) -> None:
        """Threads don't live on in a child: a call there would wait for ever."""
        with in_process(EngineDouble()) as model:
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                try:
                    model.translate("a")
                except BeamlineError as error:
                    os.write(writing, str(error).encode())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            assert os.read(reading, 1000).decode() == (
                "this model was loaded before the process forked: load it in the child"
            )
            os.close(reading)
            os.close(writing)
