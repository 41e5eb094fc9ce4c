"""Deploys applications again whenever the files of their project change, until the program ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from daskserve.client.hosting.reloading.files import FileWatch, Patterns
from daskserve.errors import ReplicaStartError
from daskserve.payload.shown_errors import shortened

#: Number of files that a line names.
NAMED = 3
#: How long `Reloader.stop` waits for a build in progress.
END_S = 5.0
#: Pause after watching has failed.
RETRY_S = 2.0


class Reloader:
    """Watches files in a thread, and calls functions when they have changed.

    Parameters
    ----------
    build
        Builds the applications, and returns a function that deploys them and returns once they run. A deploy
        may still run when the next one begins and supersedes it.
    report
        Prints a line.
    """

    def __init__(
        self,
        patterns: Patterns,
        build: Callable[[], Callable[[], Any]],
        report: Callable[[str], Any],
    ) -> None:
        self._ended = threading.Event()
        self._patterns = patterns
        self._watch = FileWatch(patterns, self._ended)
        self._build = build
        self._report = report
        self._newest = 0
        self._thread = threading.Thread(target=self._run, name="daskserve-reload", daemon=True)

    def start(self) -> None:
        """Report changes since this object was made, and later ones."""
        self._report(f"Watching {', '.join(map(_shown, self._patterns.folders))} for changes.")
        self._thread.start()

    def stop(self) -> None:
        """Stop watching and building."""
        self._ended.set()
        if self._thread.is_alive():  # false before start()
            self._thread.join(END_S)

    def _run(self) -> None:
        while changed := self._changed():
            self._report(f"{_named(changed)} changed; reloading.")
            self._newest += 1
            with self._errors_reported(self._newest):
                deploying = threading.Thread(
                    target=self._deploy, args=(self._newest, self._build()), daemon=True
                )
                if not self._ended.is_set():
                    deploying.start()

    def _changed(self) -> Sequence[str]:
        """Wait for changes and return the changed files; an empty list at the end of the program."""
        while not self._ended.is_set():
            try:
                return self._watch.wait()
            except Exception as error:
                # The thread must continue: without it, changes would be missed without a message.
                self._report(f"The files cannot be watched now: {error!r}")
                self._ended.wait(RETRY_S)
        return ()

    def _deploy(self, number: int, deploy: Callable[[], Any]) -> None:
        with self._errors_reported(number):
            deploy()
            self._report("Reloaded.")

    @contextmanager
    def _errors_reported(self, number: int) -> Iterator[None]:
        """Report the error of a change, unless a newer one has taken its place."""
        try:
            yield
        except Exception as error:
            # A build may raise anything, but the next change must still be deployed.
            if number != self._newest or self._ended.is_set():
                return
            text = str(error)
            if isinstance(error, ReplicaStartError):
                text = f"{text}\n\n{shortened(error.user_traceback)}".rstrip()
            self._report(text)


def _shown(path: str) -> str:
    found = os.path.relpath(path)
    return path if found.startswith("..") else found


def _named(files: Sequence[str]) -> str:
    if len(files) > NAMED:
        return f"{len(files)} files"
    return ", ".join(map(_shown, files))
