"""A small Hub on 127.0.0.1: what huggingface_hub's client asks for when a model is published and loaded again.

Contents live in memory. Every error's body repeats the token that was sent, so that a client which passes it on is
found out.
"""

import base64
import hashlib
import json
import math
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


@dataclass
class Repository:
    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{".gitattributes": b""}])
    titles: dict[str, str] = field(default_factory=dict)  # by commit

    @property
    def files(self):
        return self.commits[-1]

    @property
    def sha(self):
        return f"{len(self.commits):040x}"


class HubError(Exception):
    def __init__(self, status, message, code=""):
        super().__init__(message)
        self.status, self.code = status, code


class HubServer(ThreadingHTTPServer):
    """Starts as a context manager.

    `tokens` maps valid tokens to their users; `failures` maps the name of a route to the status that it answers with,
    `lost` the name of one that does its work to the status and content that it answers with all the same, None for a
    connection that breaks off.
    """

    def __init__(self, tokens):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens, self.failures, self.lost = tokens, {}, {}
        self.repositories, self.blobs, self.requests = {}, {}, []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def count(self, route):
        return sum(name == route for name, _ in self.requests)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            name, match = self.route()
            self.server.requests.append((name, self.headers.get("Authorization")))
            if name in self.server.failures:
                raise HubError(self.server.failures[name], f"{name} fails")
            status, content, headers = getattr(self, name)(**match)
            if name in self.server.lost:
                status, content = self.server.lost[name]
        except HubError as error:
            status, headers = error.status, {"X-Error-Code": error.code}
            content = {"error": f"{error} ({self.headers.get('Authorization')})"}
        if content is None:
            self.close_connection = True
            return
        if isinstance(content, bytes):
            headers = {"Content-Type": "application/octet-stream", **headers}
        else:
            headers, content = {"Content-Type": "application/json", **headers}, json.dumps(content).encode()
        self.send_response(status)
        for header, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def route(self):
        path = unquote(urlsplit(self.path).path)
        for method, pattern, name in ROUTES:
            if self.command in method and (match := re.fullmatch(pattern, path)):
                return name, match.groupdict()
        raise HubError(404, f"no route {self.command} {path}")

    def log_message(self, *_):
        pass

    # Who asks, and for what

    @property
    def user(self):
        return self.server.tokens.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def check_writable(self, repo_id):
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        if repo_id.split("/")[0] != self.user:
            raise HubError(403, f"You don't have the rights to write to {repo_id}.")

    def repository(self, repo_id):
        repository = self.server.repositories.get(repo_id)
        if repository is None or (repository.private and self.user != repo_id.split("/")[0]):
            raise HubError(404 if self.user else 401, "Repository not found", "RepoNotFound")
        return repository

    def json(self):
        return json.loads(self.body)

    # The routes

    def whoami(self):
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        return 200, {"name": self.user, "type": "user"}, {}

    def validate_yaml(self):
        errors = [{"message": error} for error in metadata_errors(self.json()["content"])]
        return 200 if not errors else 400, {"errors": errors, "warnings": []}, {}

    def create(self):
        wanted = self.json()
        repo_id = f"{wanted['organization'] or self.user}/{wanted['name']}"
        self.check_writable(repo_id)
        answer = {"url": f"{self.server.address}/{repo_id}", "name": repo_id}
        if repo_id in self.server.repositories:
            return 409, {**answer, "error": "You already created this model repo"}, {}
        self.server.repositories[repo_id] = Repository(private=wanted.get("visibility") == "private")
        return 200, answer, {}

    def preupload(self, repo_id):
        self.check_writable(repo_id)
        self.repository(repo_id)
        modes = {file["path"]: "lfs" if file["path"].endswith(LARGE) else "regular" for file in self.json()["files"]}
        return 200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}, {}

    def lfs_batch(self, repo_id):
        self.check_writable(repo_id)
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.server.address}/lfs/{wanted['oid']}"}}}
            for wanted in self.json()["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}, {}

    def lfs_upload(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "wrong content")
        self.server.blobs[oid] = self.body
        return 200, {}, {}

    def commit(self, repo_id):
        self.check_writable(repo_id)
        repository = self.repository(repo_id)
        files = dict(repository.files)
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header" and value.get("parentCommit", repository.sha) != repository.sha:
                raise HubError(412, "A commit has happened since.")
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
            else:
                title = value["summary"]
        repository.commits.append(files)
        repository.titles[repository.sha] = title
        url = f"{self.server.address}/{repo_id}/commit/{repository.sha}"
        return 200, {"success": True, "commitOid": repository.sha, "commitUrl": url}, {}

    def info(self, repo_id):
        repository = self.repository(repo_id)
        siblings = [{"rfilename": path} for path in repository.files]
        return (
            200,
            {"id": repo_id, "sha": repository.sha, "private": repository.private, "siblings": siblings},
            {},
        )

    def commits(self, repo_id):
        repository = self.repository(repo_id)
        title = repository.titles.get(repository.sha, "initial commit")
        newest = {
            "id": repository.sha,
            "title": title,
            "message": "",
            "date": "2026-01-01T00:00:00.000Z",
            "authors": [],
        }
        return 200, [newest], {}

    def tree(self, repo_id):
        return 200, [describe(*file) for file in self.repository(repo_id).files.items()], {}

    def resolve(self, repo_id, path):
        repository = self.repository(repo_id)
        if path not in repository.files:
            raise HubError(404, "Entry not found", "EntryNotFound")
        content = repository.files[path]
        etag = hashlib.sha256(content).hexdigest()
        return 200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": repository.sha, "Accept-Ranges": "none"}


def metadata_errors(card):
    """What the Hub refuses in a card's metadata, as far as it is known."""
    metadata = yaml.safe_load(card.split("---\n")[1])
    if not isinstance(metadata, dict):
        return ["metadata must be a mapping"]
    errors = []
    if not re.fullmatch(r"[a-z0-9.-]+", metadata.get("license", "other")):
        errors.append("license is no name of one")
    for result in [result for model in metadata.get("model-index", []) for result in model["results"]]:
        if not re.fullmatch(r"([\w-]+/)?[\w.-]+", result["dataset"]["type"], re.ASCII):
            errors.append(f"dataset.type is {result['dataset']['type']}")
        values = [metric["value"] for metric in result["metrics"]]
        errors += [
            f"metric.value is {each}" for each in values if type(each) not in (int, float) or not math.isfinite(each)
        ]
    return errors


def describe(path, content):
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


LARGE = (".safetensors", ".png", ".bin")
REPO, REVISION = r"(?P<repo_id>[\w.-]+/[\w.-]+)", r"[\w.-]+"
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", rf"/api/models/{REPO}/preupload/{REVISION}", "preupload"),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>\w+)", "lfs_upload"),
    ("POST", rf"/api/models/{REPO}/commit/{REVISION}", "commit"),
    ("GET", rf"/api/models/{REPO}(/revision/{REVISION})?", "info"),
    ("GET", rf"/api/models/{REPO}/commits/{REVISION}", "commits"),
    ("GET", rf"/api/models/{REPO}/tree/{REVISION}(/.*)?", "tree"),
    ("HEAD GET", rf"/{REPO}/resolve/{REVISION}/(?P<path>.+)", "resolve"),
]
