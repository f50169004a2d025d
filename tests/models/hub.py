"""A Hub on the loopback, as far as `huggingface_hub` asks one: a repository's commit, its files and their bytes."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves one repository, `org/name`. fetched: the files that were asked for, in order."""

    def __init__(self, name: str, files: dict[str, bytes], status: int = 200) -> None:
        self.name, self.files, self.status = name, files, status
        self.fetched: list[str] = []

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith(f"/api/models/{self.name}") and self.status == 200:
            if "/tree/" in path:
                return 200, {}, json.dumps([self._entry(name) for name in self.files]).encode()
            siblings = [{"rfilename": name} for name in self.files]
            return 200, {}, json.dumps({"id": self.name, "sha": COMMIT, "siblings": siblings}).encode()
        file = path.removeprefix(f"/{self.name}/resolve/{COMMIT}/")
        if file in self.files:
            if method == "GET":
                self.fetched.append(file)
            return 200, {"ETag": f'"{_digest(self.files[file])}"', "X-Repo-Commit": COMMIT}, self.files[file]
        code = {401: "RepoNotFound", 403: "GatedRepo"}.get(self.status, "RepoNotFound")
        return (404 if self.status == 200 else self.status), {"X-Error-Code": code}, b"{}"

    def _entry(self, name: str) -> dict[str, object]:
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """Serves until the block ends; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._reply("HEAD")

        def do_GET(self) -> None:
            self._reply("GET")

        def _reply(self, method: str) -> None:
            status, headers, body = hub.answer(method, self.path.split("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if method == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def cache(home: Path, name: str, files: dict[str, bytes]) -> Path:
    """What huggingface_hub would have left in HF_HOME of such a repository; gives the directory of its files."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file, data in files.items():
        (snapshot / file).write_bytes(data)
    return snapshot
