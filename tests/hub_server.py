"""A small Hub on 127.0.0.1: real repositories with commits, over the routes that huggingface_hub
uses to make a repository, commit to it and download from it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
MODEL = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<verb>[^/]+)(/(?P<revision>.+))?)?")


@dataclass
class Repository:
    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)  # branch -> commit
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], branch: str = "main", message: str = "") -> str:
        content = {**self.commits.get(self.refs.get(branch, ""), {}), **files}
        parts = "".join(f"{p}{hashlib.sha1(b).hexdigest()}" for p, b in sorted(content.items()))
        sha = hashlib.sha1(f"{parts}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = content
        self.refs[branch] = sha
        self.messages.append(message)
        return sha

    def at(self, revision: str) -> str | None:
        sha = self.refs.get(revision, revision)
        return sha if sha in self.commits else None


class HubServer:
    """Use as a context manager; `url` is what `HF_ENDPOINT` must be."""

    token = "hf_test_token"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []  # "METHOD /path"
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def _get(self) -> None:
        path = self._note()
        if match := FILE.fullmatch(path):
            self._file(**match.groupdict())
        elif (match := MODEL.fullmatch(path)) and match["verb"] in (None, "revision"):
            repository = self._repository(match["repo"])
            if repository is not None:
                sha = repository.at(match["revision"] or "main")
                files = [{"rfilename": name} for name in repository.commits.get(sha or "", {})]
                self._json(
                    {"id": match["repo"], "modelId": match["repo"], "sha": sha, "siblings": files}
                )
        else:
            self._error(404, "NotFound", f"no route for {path}")

    def do_POST(self) -> None:
        path = self._note()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._error(401, "", "Invalid credentials")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif (match := MODEL.fullmatch(path)) and match["verb"] in ("preupload", "commit"):
            repository = self._repository(match["repo"])
            if repository is None:
                return
            if match["verb"] == "preupload":
                known = repository.commits.get(repository.refs.get(match["revision"], ""), {})
                self._json(
                    {
                        "files": [
                            {
                                "path": file["path"],
                                "uploadMode": "regular",
                                "shouldIgnore": False,
                                "oid": _git_id(known.get(file["path"])),
                            }
                            for file in json.loads(body)["files"]
                        ]
                    }
                )
            else:
                self._commit(repository, match["repo"], match["revision"], body)
        else:
            self._error(404, "NotFound", f"no route for {path}")

    def _create(self, wanted: dict[str, str]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        known = self.hub.repositories.get(name)
        if known is None:
            private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            known = self.hub.repositories[name] = Repository(private)
            known.commit({".gitattributes": b""})
            self._json({"url": f"{self.hub.url}/{name}", "name": name})
        else:
            self._json({"error": "exists", "url": f"{self.hub.url}/{name}"}, status=409)

    def _commit(self, repository: Repository, name: str, branch: str, body: bytes) -> None:
        if branch not in repository.refs:
            self._error(404, "RevisionNotFound", f"no branch {branch}")
            return
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        sha = repository.commit(files, branch, lines[0]["value"]["summary"])
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha})

    def _file(self, repo: str, revision: str, path: str) -> None:
        repository = self._repository(repo)
        if repository is None:
            return
        sha = repository.at(unquote(revision))
        if sha is None:
            self._error(404, "RevisionNotFound", f"no revision {revision}")
        elif path not in repository.commits[sha]:
            self._error(404, "EntryNotFound", f"no file {path}", {"X-Repo-Commit": sha})
        else:
            content = repository.commits[sha][path]
            etag = f'"{_git_id(content)}"'
            self._send(200, content, {"X-Repo-Commit": sha, "ETag": etag})

    def _repository(self, name: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository is None or (repository.private and not allowed):
            self._error(404 if allowed else 401, "RepoNotFound", "Repository not found")
            return None
        return repository

    def _note(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path

    def _error(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        marks = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}
        self._send(status, json.dumps({"error": message}).encode(), marks)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _git_id(content: bytes | None) -> str | None:
    if content is None:
        return None
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
